"""Runs `bench.gpu`, section by section, within a time budget.

If a section raises an exception, it is printed and counted, and the next section runs. A
measurement for which there is no time is listed as skipped.

ceilings    bandwidth and matrix rates of this GPU, which are the limits of all other figures
peers       other engines, on the shape that is measured last
kernels     every kernel against torch, each in its own process: compilers run in parallel, and a
            kernel that crashes its process affects no other
models      small models, with captured steps, against torch's attention
attention   all layers of decode steps, for each KV format
8b          a model's prefill and decode, for weights × KV formats
"""

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
import transformers

from bench.common.options import PeerProgram
from bench.common.report import Report, Scalar, notes_on, report_here, to_json
from bench.engine.jobs import GPU_SHAPES, GpuShape
from bench.gpu.kernels import (
    AttentionCase,
    arguments_of,
    attention_cases,
    check_attention,
    check_groups,
    check_matmul,
)
from bench.gpu.models import check_model, check_sampling, random_llama
from bench.gpu.peers import PeerFigures, measure_peers
from bench.gpu.session import GpuSession
from bench.gpu.speeds import GpuCeilings, ModelSpeeds, measure_attention, measure_ceilings
from engine.clock import MonotonicClock
from engine.config import WeightFormat
from engine.layout import KVFormat
from engine.model import fp8

MAX_PROCESSES = 12
KERNELS_S = 240.0  # most seconds for the checks of kernels
MODEL_NEEDS_S = 45.0  # seconds to load the model again and measure one thing
CHECKED_MODELS = (
    (WeightFormat.FP32, KVFormat.FP32),
    (WeightFormat.BF16, KVFormat.BF16),
    (WeightFormat.BF16, KVFormat.INT8),
    (WeightFormat.FP8, KVFormat.FP8_E4M3),
)
MEASURED_WEIGHTS = (WeightFormat.BF16, WeightFormat.FP8)
MEASURED_KV = (KVFormat.BF16, KVFormat.FP8_E4M3, KVFormat.INT8)
ATTENTION_KV = (KVFormat.BF16, KVFormat.FP8_E4M3, KVFormat.INT8, KVFormat.INT4)


def run(
    *,
    shape_name: str,
    device: str,
    is_quick: bool,
    budget_s: float,
    json: Path | None,
    peers: Sequence[PeerProgram] = (),
) -> int:
    """Runs all sections for which there is time. Returns the exit status."""
    session = GpuSession(MonotonicClock(), budget_s, sys.stdout)
    shape, figures = GPU_SHAPES[shape_name], PeerFigures()
    with torch.inference_mode():
        bench = GpuBench(session, shape, device, is_quick=is_quick)
        bench.run(shape_name, lambda: measure_peers(session, shape, peers, figures))
    session.results[:] = figures.beside(session.results)
    config = config_of_run(shape_name, device, budget_s, is_quick=is_quick)
    return conclude("gpu", session, config | notes_on(figures.versions), json)


def config_of_run(
    shape_name: str, device: str, budget_s: float, *, is_quick: bool
) -> dict[str, Scalar]:
    """Returns the configuration for the report."""
    return {"shape": shape_name, "device": device, "quick": is_quick, "budget_s": budget_s}


def conclude(
    name: str, session: GpuSession, config: Mapping[str, Scalar], json: Path | None
) -> int:
    """Prints the summary and writes the report. Returns the exit status."""
    session.conclude(judges_goals=config["device"] != "cpu")
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
        json.write_bytes(to_json(_report(name, session, config)))
    return 1 if session.failures else 0


class GpuBench:
    """One run of the benchmark on one device."""

    def __init__(
        self, session: GpuSession, shape: GpuShape, device: str, *, is_quick: bool
    ) -> None:
        self._session = session
        self._shape = shape
        self._device = device
        self._is_quick = is_quick
        self._has_fp8 = device == "cpu" or fp8.can_multiply(torch.device(device))
        self._ceilings: GpuCeilings | None = None

    def run(self, shape_name: str, measure_peers: Callable[[], None] = lambda: None) -> None:
        """Runs all sections."""
        session = self._session
        session.section("ceilings", self._measure_ceilings)
        _free()
        measure_peers()
        session.section("kernels", self._check_kernels)
        for weights, kv_format in CHECKED_MODELS:
            if weights is not WeightFormat.FP8 or self._has_fp8:
                session.section(
                    f"model with weights {weights}, KV {kv_format}",
                    partial(self._check_model, weights, kv_format),
                    needs_s=20,
                )
        if self._ceilings is None:
            session.skip("speeds", "there are no ceilings to set them beside")
            return
        session.section("attention", self._measure_attention)
        session.section(shape_name, self._measure_model, needs_s=MODEL_NEEDS_S)

    def _measure_ceilings(self) -> None:
        self._ceilings = measure_ceilings(self._session, self._shape, self._device)

    def _check_kernels(self) -> None:
        if self._has_fp8:
            self._complain(check_matmul(self._device))
        if fp8.can_group(torch.device(self._device)):
            self._complain(check_groups(self._device))
        if self._device != "cpu":
            self._complain(check_sampling(self._device))
        cases = attention_cases(is_quick=self._is_quick)
        if self._device == "cpu":
            for case in cases:
                self._complain(check_attention(case, self._device))
            return
        end_s = self._session.clock.now_s() + min(KERNELS_S, self._session.left_s)
        with ThreadPoolExecutor(min(MAX_PROCESSES, os.cpu_count() or 1)) as pool:
            checks = [pool.submit(self._check_apart, case, end_s) for case in cases]
        for case, check in zip(cases, checks, strict=True):
            found = check.result()
            if found is None:
                self._session.skip(case.name, "no time")
            else:
                self._complain(found)

    def _check_apart(self, case: AttentionCase, end_s: float) -> list[str] | None:
        """Returns the complaints of a check that runs in its own process; None if the check has not
        ended at `end_s`.
        """
        left_s = end_s - self._session.clock.now_s()
        if left_s <= 0:
            return None
        command = [sys.executable, "-m", "bench.gpu.kernels", *arguments_of(case, self._device)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=left_s, check=False
            )
        except subprocess.TimeoutExpired:
            return None
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            return [f"{case.name}: ended with {done.returncode}: {last}"]
        return done.stdout.splitlines()

    def _check_model(self, weights: WeightFormat, kv_format: KVFormat) -> None:
        self._complain(check_model(weights, kv_format, self._device))

    def _measure_attention(self) -> None:
        assert self._ceilings is not None
        for kv_format in ATTENTION_KV:
            if self._session.has_time(f"attention/{kv_format}", 10):
                measure_attention(
                    self._session, self._shape, self._ceilings, kv_format, self._device
                )

    def _measure_model(self) -> None:
        """Measures one model in all formats of weights and KV. The bf16 weights are converted to
        fp8 at the end.
        """
        assert self._ceilings is not None
        loaded = random_llama(self._shape, KVFormat.BF16, self._device, dtype=torch.bfloat16)
        for weights in MEASURED_WEIGHTS:
            if weights is WeightFormat.FP8 and not self._has_fp8:
                self._session.skip("weights fp8", "this GPU has no fp8")
                continue
            for kv_format in MEASURED_KV[:1] if self._is_quick else MEASURED_KV:
                speeds = ModelSpeeds(
                    self._session,
                    self._shape,
                    self._ceilings,
                    loaded,
                    weights=weights,
                    kv_format=kv_format,
                )
                self._session.section(
                    f"weights {weights}, KV {kv_format}",
                    partial(speeds.run, has_prefill=kv_format is MEASURED_KV[0]),
                    needs_s=MODEL_NEEDS_S,
                )

    def _complain(self, lines: list[str]) -> None:
        for line in lines:
            self._session.fail(line)


def _free() -> None:
    """Frees the GPU memory of finished sections."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _report(name: str, session: GpuSession, config: Mapping[str, Scalar]) -> Report:
    return report_here(
        name,
        seed=0,
        config={
            **config,
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
            "failures": "; ".join(session.failures),
            "skipped": "; ".join(session.skipped),
        },
        results=session.results,
    )
