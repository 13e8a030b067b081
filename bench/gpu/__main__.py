"""Checks and times the GPU paths of the engine on a Llama with random weights, in one command:

    python -m bench.gpu [--quick] [--json FILE] [--peer vllm=PYTHON]
    python -m bench.gpu --serve DIR [--shape 1b] [--quick] [--json FILE]

With `--serve`, the whole server runs with the checkpoint in DIR. If DIR has no checkpoint, one with
random weights is written there. `bench.gpu.serve` describes the comparison. This mode also needs
the packages of a gateway; `python -m bench.gpu.wheels DIR` collects them for machines without a
network.

With `--peer vllm=PYTHON`, vLLM runs first, on the same shape, with that Python. Our bf16 figures
are printed beside vLLM's (`bench.gpu.peers`).

Without these options, the command needs torch, transformers, msgspec and, on a GPU, triton. It
needs no checkpoint and no network. A call takes under nine minutes on a Hopper GPU with the shape
of an 8 B Llama. Jobs for which there is too little memory or time are listed as skipped. `--device
cpu --shape tiny` tests the benchmark. `bench.gpu.run` lists the checks and measurements in their
order.

Exit status: 0; 1 if a check failed (missed goals are printed and fail nothing); 2 if it cannot run
here, with the reason in one line.
"""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

NEEDED = ("torch", "transformers", "numpy", "msgspec")
NEEDED_TO_SERVE = ("aiohttp", "grpc", "llguidance", "starlette", "tokenizers", "httptools", "zmq")
NEEDED_ON_A_GPU = ("triton",)
BUDGET_S = 500.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark and returns the exit status."""
    options = _options(arguments)
    reason = _why_not(options.device) or (options.serve and _absent(NEEDED_TO_SERVE))
    if reason is None and options.peer and options.serve:
        reason = "--peer has no meaning with --serve"
    if reason is None:
        return _run(options)
    sys.stderr.write(f"bench.gpu: {reason}\n")
    return 2


def _run(options: argparse.Namespace) -> int:
    """Runs the benchmark. Imports modules that need optional packages."""
    if options.serve is not None:
        from bench.gpu.serve import serve

        return serve(
            options.serve,
            shape_name=options.shape,
            device=options.device,
            is_quick=options.quick,
            budget_s=BUDGET_S if options.budget_s is None else options.budget_s,
            json=options.json,
            tp=options.tp,
        )
    from bench.common.options import peers_named
    from bench.gpu.peers import PEER_S, PEERS
    from bench.gpu.run import run
    from engine.errors import ConfigError

    try:
        peers = peers_named(options.peer, PEERS)
    except ConfigError as error:
        sys.stderr.write(f"bench.gpu: {error}\n")
        return 2
    budget_s = BUDGET_S + PEER_S * len(peers) if options.budget_s is None else options.budget_s
    return run(
        shape_name=options.shape,
        device=options.device,
        is_quick=options.quick,
        budget_s=budget_s,
        json=options.json,
        peers=peers,
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description="Checks and times the engine's GPU paths."
    )
    parser.add_argument("--quick", action="store_true", help="fewer checks and jobs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report here")
    parser.add_argument("--shape", choices=("8b", "1b", "tiny"), default="8b", help="of the model")
    parser.add_argument("--serve", type=Path, metavar="DIR", help="run the whole server")
    parser.add_argument(
        "--tp", type=int, metavar="N", help="with --serve: a worker of N ranks too, on N devices"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=PYTHON",
        help="also measure vllm, run by that Python",
    )
    parser.add_argument("--budget-s", type=float, help="seconds for everything")
    return parser.parse_args(arguments)


def _why_not(device: str) -> str | None:
    """Returns the reason why the benchmark cannot run here; None if it can."""
    absent = _absent(NEEDED)
    if absent is not None or device == "cpu":
        return absent
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device here; --device cpu --shape tiny tries out the bench itself"
    return _absent(NEEDED_ON_A_GPU)


def _absent(needed: Sequence[str]) -> str | None:
    """Returns a reason that names the missing packages; None if all are installed."""
    absent = [name for name in needed if importlib.util.find_spec(name) is None]
    if not absent:
        return None
    return (
        f"{' and '.join(absent)} not installed; where there is no network, unpack the wheel"
        " into a folder and name the folder in PYTHONPATH"
    )


if __name__ == "__main__":
    sys.exit(main())
