"""The few figures that README.md shows, each from a report in `bench/results/`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Headline:
    """One row. It is compared with `peer`; without a peer, with the limit if there is one."""

    label: str
    report: str  # name of the file, without .json
    result: str
    peer: str | None = None


HEADLINES: tuple[Headline, ...] = (
    Headline("prefill, fp32 weights, 88 M model", "engine", "prefill/fp32", "vllm"),
    Headline("decode of 32 sequences, fp32 weights", "engine", "decode_b32/fp32", "vllm"),
    Headline("decode of one sequence, fp32 weights", "engine", "decode_b1/fp32", "vllm"),
    Headline("decode of 32 sequences, int8 weights", "engine", "decode_b32/int8", "vllm_w8a8"),
    Headline("decode of one sequence, int8 weights", "engine", "decode_b1/int8", "vllm_w8a8"),
    Headline("KV over shared memory, blocks of 1 MiB", "kv", "shm/1MiB", "mooncake"),
    Headline("KV over the network, encrypted, blocks of 1 MiB", "kv", "zmq/1MiB", "mooncake"),
    Headline("placements at 1,000 workers", "router", "decisions/1000", "dict_bitmask"),
    Headline("tokens per CPU second of the gateway", "gateway", "gateway/tok_per_cpu_s", "fastapi"),
    Headline(
        "first token of 2,048 tokens after all workers died, store against none",
        "store",
        "ttft_gain/memory",
    ),
    Headline(
        "requests/s of fluid pools over the better of walled and mixed ones, a load that turns",
        "fluid",
        "fluid/turning",
    ),
    Headline(
        "goodput of fluid pools over the best walled split, simulated",
        "fluid_simulated",
        "goodput_fluid/best_split/conversation_trace",
    ),
    Headline("goodput of planned pools over the best fixed split, simulated", "elastic", "ratio"),
)
