"""Workers in memory: the real cores and lease protocol around a fake model, network and gateway.

Nothing happens by itself. A test chooses one of `FakeCluster.moves()` at a time, so it can reach
any order in which threads and messages may run, without a thread or a clock.
"""
