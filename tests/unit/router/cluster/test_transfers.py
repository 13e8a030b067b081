"""KV moved between pairs of workers: the sums, and the bound on the number of pairs."""

from router.cluster.learning import MAX_PAIRS, MovedKv, PairTransfers


def test_transfers_are_summed_by_pair():
    transfers = PairTransfers()
    transfers.record("p0", "d0", 100, 1.0, seconds=0.5, exposed_s=0.1)
    transfers.record("p0", "d1", 100, 2.0)
    transfers.record("p0", "d0", 50, 3.0, seconds=0.5)
    assert list(transfers.pairs) == [
        MovedKv("p0", "d1", 1, 100, 0, 0.0, 0.0, 2.0),
        MovedKv("p0", "d0", 2, 150, 150, 1.0, 0.1, 3.0),
    ]


def test_the_pair_that_was_used_longest_ago_is_forgotten():
    transfers = PairTransfers()
    for number in range(MAX_PAIRS):
        transfers.record("p0", f"d{number}", 1, 0.0)
    transfers.record("p0", "d0", 1, 1.0)
    transfers.record("p1", "d0", 1, 2.0)
    sinks = {(each.source, each.sink) for each in transfers.pairs}
    assert len(sinks) == MAX_PAIRS
    assert ("p0", "d0") in sinks
    assert ("p0", "d1") not in sinks
