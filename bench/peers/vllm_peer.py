"""vLLM without its prefix cache: on CPUs in fp32, or in bf16 with weights that are made up.

Driven by `driver.py`. Variants:

    f32           the checkpoint's weights, on CPUs
    bf16-dummy    weights that need no checkpoint, on a GPU; `--checkpoint` has config.json only

The engine runs in this process, where all requests are there before the first step. The usual
engine, in a process of its own, starts while they still come. Detokenising is off, as with all
engines.
"""

import argparse
import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from driver import Prompts, Stopwatch  # type: ignore[import-not-found]


class Vllm:
    """One engine."""

    def __init__(self, options: argparse.Namespace) -> None:
        import vllm  # type: ignore[import-not-found]

        self.facts = {"version": vllm.__version__}
        is_dummy = options.variant != "f32"
        self._engine = vllm.LLM(
            options.checkpoint,
            dtype="bfloat16" if is_dummy else "float32",
            load_format="dummy" if is_dummy else "auto",
            enforce_eager=False,  # compiled is faster, though it loads a minute longer
            max_model_len=options.max_len,
            max_num_seqs=options.max_sequences,
            max_num_batched_tokens=8192 if is_dummy else max(4096, options.max_len),
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            disable_log_stats=True,
        ).llm_engine
        self._max_len = options.max_len
        self._num_requests = 0

    def generate(self, prompts: Prompts, num_steps: int) -> dict[str, object]:
        """All requests are added, then the engine steps until it has no more to do."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            max_tokens=num_steps + 1, temperature=0.0, ignore_eos=True, detokenize=False
        )
        names = [f"{self._num_requests + i}" for i in range(len(prompts))]
        self._num_requests += len(prompts)
        watch = Stopwatch()
        for name, prompt in zip(names, prompts, strict=True):
            self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        answers: dict[str, list[int]] = {}
        while self._engine.has_unfinished_requests():
            had_all = len(answers) == len(names)
            for output in self._engine.step():
                answers[output.request_id] = list(output.outputs[0].token_ids)
            if not had_all and len(answers) == len(names):
                watch.stamp_first()
        if num_steps:
            watch.stamp_last()
        answer: dict[str, object] = watch.answer([answers[name] for name in names])
        return answer

    def decode(self, prompts: Prompts, num_steps: int) -> dict[str, object]:
        """Times steps in which every sequence gets a token, and drops the sequences.

        While later prompts are still computed, the first sequences go on already.
        """
        from vllm import SamplingParams

        longest = max(map(len, prompts))
        sampling = SamplingParams(
            max_tokens=self._max_len - longest, temperature=0.0, ignore_eos=True, detokenize=False
        )
        names = [f"{self._num_requests + i}" for i in range(len(prompts))]
        self._num_requests += len(prompts)
        for name, prompt in zip(names, prompts, strict=True):
            self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        begun: set[str] = set()
        while len(begun) < len(names):
            outputs = self._engine.step()
            begun |= {output.request_id for output in outputs if output.outputs[0].token_ids}
        watch = Stopwatch()
        watch.stamp_first()
        for _ in range(num_steps):
            outputs = self._engine.step()
            if len(outputs) < len(names) or any(output.finished for output in outputs):
                raise RuntimeError("a step did not have all sequences")
        watch.stamp_last()
        self._engine.abort_request(names)
        answer: dict[str, object] = watch.answer([])
        return answer


def load(options: argparse.Namespace) -> Any:
    """The engine, loaded."""
    if options.variant not in ("f32", "bf16-dummy"):
        raise ValueError(f"no variant {options.variant}")
    cores = sorted(os.sched_getaffinity(0))[: options.threads]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    return Vllm(options)
