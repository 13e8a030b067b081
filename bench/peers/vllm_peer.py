"""vLLM without prefix cache, driven by `driver.py`. Variants:

    f32           the checkpoint's weights, on CPUs
    w8a8          int8 weights with a scale for each output, and activations in int8, scaled token
                  by token, on CPUs
    bf16-dummy    weights that need no checkpoint, on a GPU; `--checkpoint` has config.json only

The checkpoint in W8A8 is written into a temporary folder, in the format of compressed-tensors.
Embedding and output matrix are not quantised, which is usual. All other computation is in bf16 if
the processor multiplies bf16, else in fp32.

The engine runs in this process, so that it has all requests before its first step. vLLM's default
is an engine process, which would start while requests still arrive. Detokenising is off, like in
all engines.
"""

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # KV memory in GiB
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from driver import Prompts, Stopwatch  # type: ignore[import-not-found]


def write_w8a8(checkpoint: Path, folder: Path) -> None:
    """Writes the checkpoint with int8 matrices in all layers. Other weights are unchanged."""
    import torch
    from safetensors.torch import load_file, save_file

    for file in checkpoint.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if not name.endswith("proj.weight"):
                tensors[name] = tensor
                continue
            wide = tensor.float()
            scale = wide.abs().amax(1, keepdim=True) / 127
            tensors[name] = (wide / scale).round().to(torch.int8)
            tensors[f"{name}_scale"] = scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = _compressed_tensors()
    (folder / "config.json").write_text(json.dumps(config))


def _compressed_tensors() -> dict[str, object]:
    number = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**number, "strategy": "channel", "dynamic": False, "observer": "minmax"},
        "input_activations": {**number, "strategy": "token", "dynamic": True, "observer": None},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def _multiplies_bf16() -> bool:
    flags = Path("/proc/cpuinfo").read_text().split()
    return "amx_bf16" in flags or "avx512_bf16" in flags


class Vllm:
    """One vLLM engine."""

    def __init__(self, options: argparse.Namespace, checkpoint: Path, dtype: str) -> None:
        import vllm  # type: ignore[import-not-found]

        self.facts = {"version": vllm.__version__}
        is_dummy = options.variant == "bf16-dummy"
        self._engine = vllm.LLM(
            str(checkpoint),
            dtype=dtype,
            load_format="dummy" if is_dummy else "auto",
            enforce_eager=False,  # compiled code is faster, but takes a minute longer to load
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
        """Adds all requests, then runs steps until all answers are complete."""
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
        """Times steps in which every sequence gets a token, then aborts the sequences.

        The first sequences already decode while later prompts are computed.
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
    """Loads the model and returns the engine."""
    cores = sorted(os.sched_getaffinity(0))[: options.threads]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    dtypes = {"f32": "float32", "bf16-dummy": "bfloat16"}
    if options.variant in dtypes:
        return Vllm(options, Path(options.checkpoint), dtypes[options.variant])
    if options.variant != "w8a8":
        raise ValueError(f"no variant {options.variant}")
    with tempfile.TemporaryDirectory(prefix="baton-w8a8-") as folder:
        write_w8a8(Path(options.checkpoint), Path(folder))
        return Vllm(options, Path(folder), "bfloat16" if _multiplies_bf16() else "float32")
