"""vLLM's build for CPUs, in fp32, without its prefix cache. Driven by `driver.py`.

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
        self._engine = vllm.LLM(
            options.checkpoint,
            dtype="float32",
            enforce_eager=False,  # compiled is faster, though it loads a minute longer
            max_model_len=options.max_len,
            max_num_seqs=options.max_sequences,
            max_num_batched_tokens=max(4096, options.max_len),
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            disable_log_stats=True,
        ).llm_engine
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


def load(options: argparse.Namespace) -> Any:
    """The engine, loaded."""
    if options.variant != "f32":
        raise ValueError(f"no variant {options.variant}")
    cores = sorted(os.sched_getaffinity(0))[: options.threads]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    return Vllm(options)
