"""The default size of a worker's KV memory."""

import pytest

from deploy.worker.memory import (
    LEAST_BYTES,
    PAGE_BYTES,
    PLENTY_BYTES,
    available_bytes,
    kv_bytes,
)

MIB, GIB = 2**20, 2**30
LLAMA_1B = 16 * 2 * 8 * 64 * 4 * 16  # bytes of a block of 16 tokens in fp32: 1 MiB


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
            0,
            weights_bytes=0,
            num_workers=1,
            block_bytes=2 * LEAST_BYTES,
            num_context_blocks=1,
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
