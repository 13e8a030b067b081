"""Runs Dynamo's router and simulator on the same trace at the same costs.

Dynamo prices steps by tables: prompts by the new tokens of a pass, decode steps by the tokens of
all contexts and their mean length. Both tables are filled from one of our profiles, so the two
simulators have the same costs and the same number of blocks. Dynamo reports means and percentiles
over all requests. There KV arrives at decode workers at once; here it has to be pulled.

Source: `python -m dynamo.replay`, ai-dynamo 1.1.
"""

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.simulator.hardware import HardwareProfile, Pricing, StepPrice
from bench.simulator.traces import Trace
from engine.errors import BatonError

NAME = "dynamo"
TIMEOUT_S = 600.0
_NEW_TOKENS = (1, 512, 1024, 2048, 4096, 8192)
_CONTEXT_TOKENS = tuple(512 * 2**i for i in range(12))
_MEAN_CONTEXT = (512, 2048, 8192, 32768, 131072)


class PeerError(BatonError):
    """The peer could not be run, or its report could not be read."""


@dataclass(frozen=True, slots=True)
class PeerDeployment:
    """A simulated deployment and rate, for both simulators."""

    prefill: int
    decode: int
    speed_up: float = 1.0

    def __str__(self) -> str:
        return f"{self.prefill}+{self.decode}x{self.speed_up:g}"


class _Answer(msgspec.Struct):
    mean_ttft_ms: float
    p90_ttft_ms: float
    p90_tpot_ms: float
    prefix_cache_reused_ratio: float
    wall_time_ms: float
    completed_requests: int


@dataclass(frozen=True, slots=True)
class PeerReplay:
    """The result of a trace in either simulator."""

    ttft_mean_s: float
    ttft_p90_s: float
    tpot_p90_s: float
    hits: float
    wall_s: float

    def __str__(self) -> str:
        return (
            f"TTFT {self.ttft_mean_s:.3f} s (p90 {self.ttft_p90_s:.3f}), "
            f"TPOT p90 {1000 * self.tpot_p90_s:.1f} ms, hits {self.hits:.1%}, "
            f"played in {self.wall_s:.1f} s"
        )

    def keeps(self, *, ttft_s: float, tpot_s: float) -> bool:
        """True if nine of ten requests keep each of the bounds."""
        return self.ttft_p90_s <= ttft_s and self.tpot_p90_s <= tpot_s


class Dynamo:
    """Runs the peer; its trace and tables are in files until it is closed."""

    def __init__(self, python: Path, trace: Trace, hardware: HardwareProfile) -> None:
        self._python = python
        self._trace = trace
        self._hardware = hardware
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> "Dynamo":
        self._folder = tempfile.TemporaryDirectory()
        (self._path / "trace.jsonl").write_bytes(mooncake_lines(self._trace))
        np.savez(self._path / "costs.npz", **tables(self._hardware))
        return self

    def __exit__(self, *_: object) -> None:
        assert self._folder is not None
        self._folder.cleanup()

    @property
    def _path(self) -> Path:
        assert self._folder is not None
        return Path(self._folder.name)

    def play(self, shape: PeerDeployment, router: str) -> PeerReplay:
        """Plays the trace; `router` is `kv_router` or `round_robin`. Raises PeerError."""
        report = self._path / "report.json"
        report.unlink(missing_ok=True)
        command = [str(self._python), *self._arguments(shape, router, report)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
            answer = msgspec.json.decode(report.read_bytes(), type=_Answer)
        except subprocess.TimeoutExpired as error:
            raise PeerError(f"{NAME} took more than {TIMEOUT_S:.0f} s") from error
        except FileNotFoundError as error:
            if not self._python.exists():
                raise PeerError(f"{self._python}: no such file") from error
            raise PeerError(f"{NAME} reported nothing: {done.stderr[-500:]}") from error
        except msgspec.DecodeError as error:
            raise PeerError(f"{NAME}'s report has another format: {error}") from error
        if answer.completed_requests != len(self._trace.requests):
            raise PeerError(f"{NAME} answered {answer.completed_requests} requests only")
        return PeerReplay(
            answer.mean_ttft_ms / 1000,
            answer.p90_ttft_ms / 1000,
            answer.p90_tpot_ms / 1000,
            answer.prefix_cache_reused_ratio,
            answer.wall_time_ms / 1000,
        )

    def _arguments(self, shape: PeerDeployment, router: str, report: Path) -> Sequence[str]:
        engine = {
            "block_size": self._hardware.layout.block_size,
            "num_gpu_blocks": self._hardware.num_blocks,
            "planner_profile_data": str(self._path / "costs.npz"),
            "enable_prefix_caching": True,
            "max_num_batched_tokens": self._hardware.max_batch_tokens,
        }
        prefill, decode = (
            msgspec.json.encode({**engine, "worker_type": kind}).decode()
            for kind in ("prefill", "decode")
        )
        options = {
            "replay-mode": "offline",
            "router-mode": router,
            "trace-block-size": self._trace.block_tokens,
            "num-prefill-workers": shape.prefill,
            "num-decode-workers": shape.decode,
            "arrival-speedup-ratio": shape.speed_up,
            "prefill-engine-args": prefill,
            "decode-engine-args": decode,
            "report-json": report,
        }
        pairs = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        return ["-m", "dynamo.replay", str(self._path / "trace.jsonl"), *pairs]


def mooncake_lines(trace: Trace) -> bytes:
    """Returns a trace in Mooncake's format."""
    lines = [
        msgspec.json.encode(
            {
                "timestamp": round(r.arrived_s * 1000),
                "input_length": r.input_len,
                "output_length": r.output_len,
                "hash_ids": list(r.block_ids),
            }
        )
        for r in trace.requests
    ]
    return b"\n".join(lines) + b"\n"


def tables(hardware: HardwareProfile) -> Mapping[str, Any]:
    """Returns a profile's costs as the peer reads them, in milliseconds."""
    pricing = Pricing(hardware)
    prefill_s = [pricing.step_s(StepPrice(num_new=n, squares=n * n)) for n in _NEW_TOKENS]
    decode_s = [
        [hardware.decode.seconds(max(kv // mean, 1), kv) for mean in _MEAN_CONTEXT]
        for kv in _CONTEXT_TOKENS
    ]
    return {
        "prefill_isl": np.array(_NEW_TOKENS, dtype=float),
        "prefill_ttft_ms": np.array(prefill_s) * 1000,
        "decode_active_kv_tokens": np.array(_CONTEXT_TOKENS, dtype=float),
        "decode_context_length": np.array(_MEAN_CONTEXT, dtype=float),
        "decode_itl": np.array(decode_s) * 1000,
    }
