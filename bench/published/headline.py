"""The few figures that README.md shows, each from a report in `bench/results/`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Headline:
    """One row. `peer` is the system it stands beside; without one, its limit if it has one."""

    label: str
    report: str  # name of the file, without .json
    result: str
    peer: str | None = None


HEADLINES: tuple[Headline, ...] = (
    Headline("prefill with int8 weights, 88 M model", "engine", "prefill/int8"),
    Headline("decoding 32 sequences with int8 weights", "engine", "decode_b32/int8"),
    Headline("KV over shared memory, blocks of 1 MiB", "kv", "shm/1MiB"),
    Headline("placements at 1,000 workers", "router", "decisions/1000", "dict_bitmask"),
    Headline("tokens per second of gateway CPU", "gateway", "gateway/tok_per_cpu_s", "uvloop"),
    Headline("goodput of planned pools over the best fixed split, simulated", "elastic", "ratio"),
)
