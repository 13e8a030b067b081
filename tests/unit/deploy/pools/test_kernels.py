"""The machine reports workers whose kernels differ."""

import pytest

from deploy.pools.kernels import kernel_troubles
from deploy.pools.workers.record import PoolWorker
from engine.messages import Role, WorkerId

ONE = "cpu avx2 fused"
TWO = "cpu avx2 by-layer tp2 pp1 ep1"


def worker(
    name: str,
    kernels: str,
    *,
    role: Role = Role.DECODE,
    version: str = "v1",
    is_connected: bool = True,
):
    found = PoolWorker(WorkerId(name), role, 0.0, version=version)
    found.kernels, found.role, found.is_connected = kernels, role, is_connected
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


def test_pools_that_are_split_in_different_ways_are_no_trouble():
    prefill = [worker(f"p{i}", ONE, role=Role.PREFILL) for i in range(2)]
    assert kernel_troubles([*prefill, worker("d0", TWO), worker("d1", TWO)]) == ()


@pytest.mark.parametrize("role", [Role.DECODE, Role.MIXED])
def test_splits_that_differ_among_workers_of_the_same_work_are_reported(role):
    prefill = worker("p0", ONE, role=Role.PREFILL)
    there = [worker("d0", TWO), worker("d1", TWO), worker("d2", ONE, role=role)]
    decode, *more = kernel_troubles([prefill, *there])
    assert decode.startswith(
        "workers of v1 that decode are split in different ways: d2 with one rank, the others with"
        " tp2 pp1 ep1; the tokens"
    )
    assert not more


def test_kernels_of_one_split_may_not_differ_between_the_pools_either():
    (sentence,) = kernel_troubles([worker("p0", "gpu a", role=Role.PREFILL), worker("d0", "gpu b")])
    assert "d0 with gpu b" in sentence
