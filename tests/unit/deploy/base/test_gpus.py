"""GPUs of a machine: how they are found, limited by the environment, and assigned."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.base.gpus import FoundGpus, GpuBooks, HostGpu, num_that_fit, parse_smi, visible
from engine.errors import ConfigError

A, B, C = (HostGpu(f"GPU-{letter * 4}", "H200") for letter in "abc")
THREE = FoundGpus((A, B, C))
SMI = """GPU-aaaa, NVIDIA H200, 143771 MiB, 570.1
GPU-bbbb, NVIDIA H200, 143771 MiB, 570.1
"""


def test_the_tools_lines_are_read():
    about = "NVIDIA H200, 143771 MiB, 570.1"
    assert parse_smi(SMI) == (HostGpu("GPU-aaaa", about), HostGpu("GPU-bbbb", about))
    assert parse_smi("No devices were found\n") == ()


@pytest.mark.parametrize(
    ("variable", "names"),
    [
        (None, [A.name, B.name, C.name]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("2,0", ["2", "0"]),
        ("0,7,1", ["0"]),  # like CUDA: the first invalid index ends the list
        ("0,0", ["0"]),
        ("GPU-bb, GPU-a", [B.name, A.name]),
        ("GPU-", []),  # this prefix matches several GPUs
        ("MIG-1/2/0", ["MIG-1/2/0"]),
    ],
)
def test_the_environment_limits_the_visible_devices(variable, names):
    assert [gpu.name for gpu in visible(THREE.gpus, variable)] == names


def test_each_worker_has_gpus_of_its_own_until_it_ends():
    books = GpuBooks(THREE)
    assert books.assign("p", 1) == (A.name,)
    assert books.assign("d", 2) == (B.name, C.name)
    with pytest.raises(ConfigError, match=r"m needs 1 GPU, .* has 3; taken by: d, p"):
        books.assign("m", 1)
    books.free("p")
    assert books.assign("m", 1) == (A.name,)


def test_a_successor_gets_the_gpu_of_its_predecessor():
    books = GpuBooks(THREE)
    assert [books.assign(name, 1) for name in "xyz"] == [(A.name,), (B.name,), (C.name,)]
    for name in "xyz":
        books.free(name)
    assert books.assign("z", 1) == (C.name,)


def test_workers_can_share_a_gpu():
    books = GpuBooks(FoundGpus((A, B)))
    assert books.assign("p", 0.5) == books.assign("d", 0.5) == (A.name,)
    assert books.assign("whole", 1) == (B.name,)
    with pytest.raises(ConfigError, match=r"needs 0\.5 GPU"):
        books.assign("e", 0.5)


def test_a_machine_without_gpus_says_why():
    with pytest.raises(ConfigError, match="this machine has none: no nvidia-smi"):
        GpuBooks(FoundGpus((), "no nvidia-smi")).assign("w", 1)


@pytest.mark.parametrize(
    ("num_gpus", "each", "expected"), [(8, 1, 8), (8, 3, 2), (2, 0.5, 4), (2, 0.3, 6), (1, 0.1, 10)]
)
def test_room_counts_no_parts_of_two_gpus(num_gpus, each, expected):
    assert num_that_fit(num_gpus, each) == expected


needs = st.sampled_from([0.1, 0.25, 0.3, 0.5, 1.0, 2.0])


@given(st.lists(st.tuples(st.sampled_from("abcdef"), needs | st.none()), max_size=30))
def test_no_gpu_is_taken_more_than_once(steps):
    books = GpuBooks(THREE)
    held: dict[str, tuple[tuple[str, ...], float]] = {}
    for worker, num_gpus in steps:
        if num_gpus is None:
            books.free(worker)
            held.pop(worker, None)
        elif worker not in held:
            try:
                held[worker] = books.assign(worker, num_gpus), min(num_gpus, 1.0)
            except ConfigError:
                continue
            assert len(held[worker][0]) == max(1, num_gpus)
        for gpu in THREE.gpus:
            assert sum(part for names, part in held.values() if gpu.name in names) < 1.0001
    for worker in held:
        books.free(worker)
    assert len({*books.assign("all", 3)}) == 3
