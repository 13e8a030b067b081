"""llama.cpp through llama-cpp-python's low-level binding, in f32 or q8_0. Driven by `driver.py`.

The checkpoint is written as GGUF into a temporary folder, without a vocabulary, because tokens are
ids. In q8_0 all matrices are quantised, including the embedding and the output matrix, which is the
default of llama.cpp's own `quantize`.

Settings are llama.cpp's defaults (the KV cache is f16), with one exception: all sequences are in
one context with one unified KV cache, as in llama.cpp's server. Each long prompt is a batch of its
own. It is computed in micro-batches of 512 tokens, which attend to this prompt only.
"""

import argparse
import ctypes
import json
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf  # type: ignore[import-not-found]
import llama_cpp  # type: ignore[import-not-found]
import numpy as np
from driver import Prompts, Stopwatch  # type: ignore[import-not-found]

MICRO_BATCH_TOKENS = 512
BATCH_TOKENS = 4096
NUMPY_TYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
TYPES = {"f32": gguf.GGMLQuantizationType.F32, "q8_0": gguf.GGMLQuantizationType.Q8_0}
FILE_TYPES = {"f32": gguf.LlamaFileType.ALL_F32, "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(checkpoint: Path, path: Path, variant: str) -> None:
    """Writes the checkpoint as GGUF. Raises ValueError if the model is not a plain Llama."""
    config = json.loads((checkpoint / "config.json").read_text())
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config["model_type"] != "llama" or rope.get("rope_type", "default") != "default":
        raise ValueError("only Llama shapes without scaled rotary embeddings are converted")
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta") or rope.get("rope_theta") or 10_000.0)
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(FILE_TYPES[variant])
    writer.add_tokenizer_model("no_vocab")
    for name, values in _tensors(checkpoint):
        if name.endswith("q_proj.weight"):
            values = _interleaved(values, heads)
        elif name.endswith("k_proj.weight"):
            values = _interleaved(values, kv_heads)
        if values.ndim == 2 and variant != "f32":
            values = gguf.quants.quantize(values, TYPES[variant])
            writer.add_tensor(_gguf_name(name), values, raw_dtype=TYPES[variant])
        else:
            writer.add_tensor(_gguf_name(name), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(checkpoint: Path) -> Iterator[tuple[str, Any]]:
    """Yields names and values (fp32) of all tensors. numpy has no bf16, so the files are parsed
    here.
    """
    for file in sorted(checkpoint.glob("*.safetensors")):
        data = np.memmap(file, mode="r")
        (header_bytes,) = struct.unpack("<Q", data[:8].tobytes())
        header = json.loads(data[8 : 8 + header_bytes].tobytes())
        header.pop("__metadata__", None)
        for name, tensor in header.items():
            begin, end = (8 + header_bytes + offset for offset in tensor["data_offsets"])
            values = np.frombuffer(data[begin:end].tobytes(), NUMPY_TYPES[tensor["dtype"]])
            if tensor["dtype"] == "BF16":
                values = (values.astype("<u4") << 16).view("<f4")
            yield name, values.astype(np.float32).reshape(tensor["shape"])


def _gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if not stem.startswith("model.layers."):
        return f"{NAMES[stem]}.weight"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.weight"


def _interleaved(values: Any, heads: int) -> Any:
    """Reorders the rows of each head from halves [a b] to pairs [a0 b0 a1 b1 …], which llama.cpp
    rotates.
    """
    rows = values.shape[0]
    halves = values.reshape(heads, 2, rows // heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(values.shape)


class LlamaCpp:
    """One model with one context for all sequences."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.facts = {"version": llama_cpp.__version__}
        llama_cpp.llama_backend_init()
        with tempfile.TemporaryDirectory(prefix="baton-gguf-") as folder:
            path = Path(folder) / "model.gguf"
            write_gguf(Path(options.checkpoint), path, options.variant)
            self._model = _loaded(path)
        self._context = _context(self._model, options)
        self._memory = llama_cpp.llama_get_memory(self._context)
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)

    def generate(self, prompts: Prompts, num_steps: int) -> dict[str, object]:
        """Computes the prompts, then one batch per step with a token of each sequence."""
        llama_cpp.llama_memory_clear(self._memory, True)  # noqa: FBT003
        watch = Stopwatch()
        answers = [[token] for token in self._prefill(prompts)]
        watch.stamp_first()
        for step in range(num_steps):
            rows = [
                (seq, len(prompt) + step, [answer[-1]])
                for seq, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
            ]
            for answer, token in zip(answers, self._decode(rows), strict=True):
                answer.append(token)
        if num_steps:
            watch.stamp_last()
        result: dict[str, object] = watch.answer(answers)
        return result

    def _prefill(self, prompts: Prompts) -> list[int]:
        rows = [(seq, 0, prompt) for seq, prompt in enumerate(prompts)]
        if sum(map(len, prompts)) <= MICRO_BATCH_TOKENS:
            return self._decode(rows)
        return [token for row in rows for token in self._decode([row])]

    def _decode(self, rows: list[tuple[int, int, list[int]]]) -> list[int]:
        """Computes rows of (sequence, first position, tokens). Returns the most likely next token
        of each row.
        """
        batch = self._batch
        last = []
        i = 0
        for seq, start, ids in rows:
            for offset, token in enumerate(ids):
                batch.token[i] = token
                batch.pos[i] = start + offset
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = seq
                batch.logits[i] = offset == len(ids) - 1
                i += 1
            last.append(i - 1)
        batch.n_tokens = i
        status = llama_cpp.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        return [self._most_likely(index) for index in last]

    def _most_likely(self, index: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, index)
        return int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())


def _loaded(path: Path) -> Any:
    parameters = llama_cpp.llama_model_default_params()
    parameters.n_gpu_layers = 0
    parameters.use_mmap = False  # the file is temporary, so the weights are copied to memory
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
    if not model:
        raise RuntimeError("llama.cpp cannot load the model")
    return model


def _context(model: Any, options: argparse.Namespace) -> Any:
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx = options.max_tokens
    parameters.n_batch = BATCH_TOKENS
    parameters.n_ubatch = MICRO_BATCH_TOKENS
    parameters.n_seq_max = options.max_sequences
    parameters.n_threads = parameters.n_threads_batch = options.threads
    parameters.kv_unified = True
    context = llama_cpp.llama_init_from_model(model, parameters)
    if not context:
        raise RuntimeError("llama.cpp cannot make a context")
    return context


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _unsaid(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    """Discards llama.cpp's log. A global name keeps the callback from being freed."""


def load(options: argparse.Namespace) -> LlamaCpp:
    """Converts and loads the model. Returns the engine."""
    if options.variant not in TYPES:
        raise ValueError(f"no variant {options.variant}")
    llama_cpp.llama_log_set(_unsaid, ctypes.c_void_p(0))
    return LlamaCpp(options)
