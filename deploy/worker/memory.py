"""Computes the default size of a worker's KV memory.

A worker's share of the machine is the memory that was available before any worker started, divided
by the number of workers. Weights and head-room are subtracted from this share, and KV gets half of
the rest. The other half is for later workers, a second version during an update, and other
programs. The default is limited to a few whole contexts, because more is of no use. The system
allocates memory only when it is written.

Available memory is the smallest of these: the memory of the system, and the memory left in each
control group of this process.

On a GPU, `worker.memory_fraction` limits the worker's memory. KV gets the memory that weights and
the largest step do not need.
"""

from collections.abc import Iterator
from pathlib import Path

from engine.errors import ConfigError

KV_SHARE = 0.5  # KV's share of the memory that weights and head-room leave
HEAD_ROOM_BYTES = 512 * 2**20  # memory for interpreter, libraries, activations, logits
LEAST_BYTES = 256 * 2**20
PLENTY_BYTES = 512 * 2**20  # KV memory that is enough for any context length
NUM_CONTEXTS = 8  # number of whole contexts that are enough too
PAGE_BYTES = 64 * 2**20  # sizes are multiples of this

# On a GPU: memory of CUDA's context and libraries, which torch does not count.
CONTEXT_BYTES = 512 * 2**20
CAPTURED_BYTES = 2**30  # captured steps and compiled kernels, made after the measurement
DEVICE_PAGE_BYTES = 2 * 2**20
MOST_BLOCKS = 2**20  # maximum on a GPU; more blocks only cost the host time and memory


def kv_bytes(
    available_bytes: int,
    *,
    weights_bytes: int,
    num_workers: int,
    block_bytes: int,
    num_context_blocks: int,
) -> int:
    """Returns the bytes of KV memory of one of `num_workers` workers that share `available_bytes`.

    One whole context needs `num_context_blocks` blocks.
    """
    left_bytes = available_bytes // num_workers - weights_bytes - HEAD_ROOM_BYTES
    enough_bytes = max(PLENTY_BYTES, NUM_CONTEXTS * num_context_blocks * block_bytes)
    wanted_bytes = min(int(KV_SHARE * left_bytes), enough_bytes)
    num_bytes = max(wanted_bytes // PAGE_BYTES * PAGE_BYTES, LEAST_BYTES)
    return max(num_bytes, block_bytes)


def device_kv_bytes(  # noqa: PLR0913 - numbers
    *,
    free_bytes: int,
    total_bytes: int,
    own_bytes: int,
    peak_bytes: int,
    block_bytes: int,
    fraction: float,
    part: float = 1.0,
) -> int:
    """Returns the bytes of KV memory of a worker that may use this fraction of its part of a GPU.

    `own_bytes` are the bytes that the worker has allocated, and `peak_bytes` those that its largest
    step adds. Memory that other programs use is taken into account: the share that `fraction`
    leaves stays free. Raises ConfigError if not even one block fits.
    """
    step_bytes = peak_bytes + CAPTURED_BYTES
    share_bytes = int(fraction * part * total_bytes)
    spare_bytes = int((1 - fraction) * part * total_bytes)
    left_of_share = share_bytes - own_bytes - CONTEXT_BYTES - step_bytes
    left_free = free_bytes - spare_bytes - step_bytes
    left_bytes = min(left_of_share, left_free) // DEVICE_PAGE_BYTES * DEVICE_PAGE_BYTES
    if left_bytes < block_bytes:
        gib = 2**30
        raise ConfigError(
            f"no GPU memory is left for KV: of {total_bytes / gib:.1f} GiB {free_bytes / gib:.1f}"
            f" are free, this worker may use {share_bytes / gib:.1f}, weights take"
            f" {own_bytes / gib:.1f} and the largest step {step_bytes / gib:.1f}: use smaller steps"
            " (worker.max_batch_tokens), a narrower format (worker.weights), a larger"
            " worker.memory_fraction, or a larger GPU"
        )
    return min(left_bytes, MOST_BLOCKS * block_bytes)


def available_bytes(root: Path = Path("/")) -> int:
    """Returns the bytes that this process and its control groups may still allocate."""
    found = [_meminfo((root / "proc/meminfo").read_text())]
    found += _group_rooms(root)
    return max(min(found), 0)


def _meminfo(text: str) -> int:
    fields = dict(line.split(":", 1) for line in text.splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def _group_rooms(root: Path) -> Iterator[int]:
    """Yields the bytes that are left in each control group with a limit (cgroup v2 and v1)."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top = root / "sys/fs/cgroup"
            names = ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = top / path.lstrip("/")
        for folder in [group, *group.parents]:
            room = _group_room(folder, *names)
            if room is not None:
                yield room
            if folder == top:
                break


def _group_room(folder: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    """Returns the bytes that are left in one group.

    None if the group has no limit or cannot be read.
    """
    try:
        most = (folder / limit).read_text().strip()
        used_bytes = int((folder / usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:  # there is no group, or a container hides its groups
        return None
    if most == "max":
        return None
    return int(most) - used_bytes + int(stat.get(reclaimable, "0"))
