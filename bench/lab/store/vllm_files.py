"""vLLM for CPUs with KV in files, for `baton bench store`.

    PYTHON bench/lab/store/vllm_files.py CHECKPOINT FOLDER

vLLM's own offloading needs a GPU. `ExampleConnector` is vLLM's connector that runs on a CPU and
keeps KV after the process ends. It writes a file for each layer of each prompt. This module runs as
a script in vLLM's own environment; `bench.peers.driver` describes the protocol.
"""

import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "peers"))

CONTEXT_LEN = 4096


class VllmFiles:
    """One engine whose KV is in a folder."""

    def __init__(self, checkpoint: str, folder: str) -> None:
        vllm: Any = import_module("vllm")
        config: Any = import_module("vllm.config")
        self.facts: dict[str, object] = {"version": str(vllm.__version__)}
        self._sampling = vllm.SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        self._engine = vllm.LLM(
            checkpoint,
            dtype="float32",
            enforce_eager=True,
            max_model_len=CONTEXT_LEN,
            max_num_batched_tokens=CONTEXT_LEN,
            kv_transfer_config=config.KVTransferConfig(
                kv_connector="ExampleConnector",
                kv_role="kv_both",
                kv_connector_extra_config={"shared_storage_path": folder},
            ),
        )

    def ask(self, prompt: list[int]) -> dict[str, object]:
        """Computes one token. Returns the seconds, and the number of prompt tokens that were
        cached.
        """
        begin_s = time.perf_counter()
        [answer] = self._engine.generate(
            [{"prompt_token_ids": prompt}], self._sampling, use_tqdm=False
        )
        seconds = time.perf_counter() - begin_s
        return {"seconds": seconds, "num_cached": answer.num_cached_tokens or 0}


def main() -> None:
    """Answers commands until standard input is closed."""
    driver: Any = import_module("driver")
    out = driver.stdout_for_answers()
    driver.drive(lambda: VllmFiles(*sys.argv[1:3]), sys.stdin, out)
    os._exit(0)  # ends at once, because vLLM's threads may outlive the interpreter


if __name__ == "__main__":
    main()
