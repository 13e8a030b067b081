"""Workers in memory: the real cores and lease protocol around a fake model, network and gateway.

Nothing happens by itself. A test performs one of `FakeCluster.moves()` at a time. So a test can
reach any order in which threads and messages may run, without threads and without a clock.
"""
