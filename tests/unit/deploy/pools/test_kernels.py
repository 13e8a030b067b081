"""Workers whose kernels differ are told."""

from deploy.pools.kernels import kernel_troubles
from deploy.pools.workers.record import PoolWorker
from engine.messages import Role, WorkerId


def worker(name: str, kernels: str, *, version: str = "v1", is_connected: bool = True):
    found = PoolWorker(WorkerId(name), Role.DECODE, 0.0, version=version)
    found.kernels, found.is_connected = kernels, is_connected
    return found


def test_equal_kernels_are_no_trouble():
    assert kernel_troubles([worker("d0", "cpu avx2"), worker("d1", "cpu avx2")]) == ()


def test_the_workers_that_differ_from_most_are_named():
    three = [worker("d0", "cpu avx512"), worker("d1", "cpu avx2"), worker("d2", "cpu avx512")]
    (sentence,) = kernel_troubles(three)
    assert sentence.startswith(
        "kernels of v1 differ: d1 with cpu avx2, the others with cpu avx512;"
    )


def test_versions_are_apart_as_nothing_crosses_them():
    assert kernel_troubles([worker("d0", "a"), worker("d1", "b", version="v2")]) == ()


def test_a_worker_that_is_gone_or_says_nothing_does_not_count():
    gone, silent = worker("d1", "b", is_connected=False), worker("d2", "")
    assert kernel_troubles([worker("d0", "a"), gone, silent]) == ()
