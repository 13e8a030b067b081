"""The default size of a worker's KV memory."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from deploy.worker.memory import (
    CAPTURED_BYTES,
    CONTEXT_BYTES,
    DEVICE_PAGE_BYTES,
    LEAST_BYTES,
    MOST_BLOCKS,
    PAGE_BYTES,
    PLENTY_BYTES,
    available_bytes,
    device_kv_bytes,
    kv_bytes,
)
from engine.errors import ConfigError

MIB, GIB = 2**20, 2**30
LLAMA_1B = 16 * 2 * 8 * 64 * 4 * 16  # bytes of a block of 16 tokens in fp32 (1 MiB)


def sized(available: int, *, workers: int = 2, weights: int = 0, context_blocks: int = 8192) -> int:
    return kv_bytes(
        available,
        weights_bytes=weights,
        num_workers=workers,
        block_bytes=LLAMA_1B,
        num_context_blocks=context_blocks,
    )


def test_long_context_gets_half_of_the_memory_after_weights():
    # (24 GiB / 2 - 1.5 GiB - 0.5 GiB) / 2
    assert sized(24 * GIB, weights=3 * GIB // 2) == 5 * GIB


def test_small_context_gets_no_more_than_plenty():
    assert sized(1024 * GIB, context_blocks=32) == PLENTY_BYTES


def test_huge_machine_gives_a_few_whole_contexts():
    assert sized(1024 * GIB) == 8 * 8192 * LLAMA_1B


@pytest.mark.parametrize("available", [0, GIB, 2 * GIB])
def test_machine_without_memory_gives_the_minimum(available):
    assert sized(available, weights=8 * GIB) == LEAST_BYTES


def test_one_block_always_fits():
    assert (
        kv_bytes(
            0, weights_bytes=0, num_workers=1, block_bytes=2 * LEAST_BYTES, num_context_blocks=1
        )
        == 2 * LEAST_BYTES
    )


def test_all_workers_together_stay_within_half_of_the_memory():
    for workers in range(1, 33):
        size = sized(64 * GIB, workers=workers)
        assert size % PAGE_BYTES == 0
        assert size == LEAST_BYTES or workers * size <= 32 * GIB


def machine(root, *, available_kib: int, groups: dict[str, dict[str, str]], mine: str):
    files = {"proc/meminfo": f"MemTotal: 9 kB\nMemAvailable:  {available_kib} kB\n"}
    files["proc/self/cgroup"] = mine
    for folder, contents in groups.items():
        files |= {f"sys/fs/cgroup/{folder}/{name}": text for name, text in contents.items()}
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def group(most: str, used: int, inactive: int) -> dict[str, str]:
    stat = f"anon 1\ninactive_file {inactive}\n"
    return {"memory.max": most, "memory.current": str(used), "memory.stat": stat}


def test_without_limits_the_available_memory_of_the_system_counts(tmp_path):
    root = machine(tmp_path, available_kib=2048, groups={}, mine="0::/\n")
    assert available_bytes(root) == 2 * MIB


def test_tightest_group_counts_and_file_pages_are_reclaimable(tmp_path):
    groups = {"pod": group("1000", 700, 100), "pod/worker": group("max", 5, 0), "": {}}
    root = machine(tmp_path, available_kib=2048, groups=groups, mine="0::/pod/worker\n")
    assert available_bytes(root) == 400


def test_cgroups_of_version_1_count_too(tmp_path):
    limits = {
        "memory.limit_in_bytes": "900",
        "memory.usage_in_bytes": "300",
        "memory.stat": "total_inactive_file 50\n",
    }
    root = machine(
        tmp_path,
        available_kib=2048,
        groups={"memory/box": limits},
        mine="2:cpu:/box\n4:memory:/box\n",
    )
    assert available_bytes(root) == 650


def test_group_over_its_limit_leaves_nothing(tmp_path):
    root = machine(tmp_path, available_kib=2048, groups={"a": group("10", 700, 0)}, mine="0::/a\n")
    assert available_bytes(root) == 0


H200 = 141 * GIB


def on_gpu(*, weights: int = 16 * GIB, others: int = 0, peak: int = 2 * GIB, **more) -> int:
    """Returns the KV memory of a worker with loaded weights, beside other programs on the GPU."""
    numbers = {"fraction": 0.9, "part": 1.0, "block_bytes": 2 * MIB, **more}
    return device_kv_bytes(
        free_bytes=H200 - weights - CONTEXT_BYTES - others,
        total_bytes=H200,
        own_bytes=weights,
        peak_bytes=peak,
        **numbers,
    )


def test_kv_gets_the_memory_that_the_fraction_leaves_on_a_gpu():
    left = int(0.9 * H200) - 16 * GIB - CONTEXT_BYTES - 2 * GIB - CAPTURED_BYTES
    assert on_gpu() == left // DEVICE_PAGE_BYTES * DEVICE_PAGE_BYTES


def test_two_workers_share_a_gpu_in_any_order():
    alone = on_gpu(part=0.5)
    beside = on_gpu(part=0.5, others=int(0.45 * H200))
    assert alone == beside
    assert 2 * (alone + 16 * GIB + CONTEXT_BYTES + 2 * GIB + CAPTURED_BYTES) <= 0.9 * H200


def test_other_programs_on_the_gpu_leave_less():
    assert on_gpu(others=50 * GIB) < on_gpu() - 49 * GIB


def test_a_model_that_leaves_no_room_is_refused_with_the_numbers():
    with pytest.raises(ConfigError, match=r"of 141\.0 GiB 0\.5 are free.* weights take 140\.0"):
        on_gpu(weights=140 * GIB)


def test_a_small_model_gets_a_bounded_number_of_blocks():
    assert on_gpu(block_bytes=8 * 2**10) == MOST_BLOCKS * 8 * 2**10


sizes = st.integers(0, 200 * GIB)


@given(sizes, sizes, sizes, st.floats(0.05, 1.0), st.sampled_from([0.25, 0.5, 1.0]))
def test_weights_step_and_kv_stay_within_the_share(own, free, peak, fraction, part):
    total = 200 * GIB
    assume(own + free <= total)
    try:
        kv = device_kv_bytes(
            free_bytes=free,
            total_bytes=total,
            own_bytes=own,
            peak_bytes=peak,
            block_bytes=2 * MIB,
            fraction=fraction,
            part=part,
        )
    except ConfigError:
        return
    assert kv > 0
    assert own + peak + kv <= fraction * part * total
    assert kv + peak <= free
