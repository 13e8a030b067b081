"""Writes GGUF files for tests: any keys and tensors, and small models with a vocabulary."""

import struct
from dataclasses import dataclass, field
from pathlib import Path

ALIGNMENT = 32
NUMBERS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q6_K": 14, "BF16": 30}
BYTES = {  # the letter by which byte-level BPE writes each byte, in byte order
    **{b: chr(b) for b in (*range(33, 127), *range(161, 173), *range(174, 256))}
}
BYTES |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in BYTES)}


@dataclass
class Contents:
    """The contents of a file. A tensor is (type, dimensions from the outermost, bytes)."""

    values: dict[str, object] = field(default_factory=dict)
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = field(default_factory=dict)
    version: int = 3

    def encoded(self) -> bytes:
        pairs = b"".join(_string(key) + _typed(value) for key, value in self.values.items())
        placed, offset = b"", 0
        for name, (kind, shape, data) in self.tensors.items():
            dims = struct.pack(f"<{len(shape)}Q", *shape[::-1])
            number = NUMBERS.get(kind, 99)
            placed += _string(name) + struct.pack("<I", len(shape)) + dims
            placed += struct.pack("<IQ", number, offset)
            offset += _padded(len(data))
        counts = struct.pack("<IQQ", self.version, len(self.tensors), len(self.values))
        header = b"GGUF" + counts + pairs + placed
        parts = [header, *(data for _, _, data in self.tensors.values())]
        return b"".join(part.ljust(_padded(len(part)), b"\0") for part in parts)

    def write(self, path: Path) -> Path:
        path.write_bytes(self.encoded())
        return path


def tiny(architecture: str = "llama", *, layers: int = 2) -> Contents:
    """Returns a model of 4 heads of size 8 with zero weights.

    Its tokens are all bytes and two words.
    """
    name, hidden, kv, ffn = architecture, 32, 16, 48
    tokens = [*(BYTES[b] for b in range(256)), "<s>", "</s>", "he", "Ġhe", "12"]
    values: dict[str, object] = {
        "general.architecture": name,
        f"{name}.block_count": layers,
        f"{name}.context_length": 512,
        f"{name}.embedding_length": hidden,
        f"{name}.feed_forward_length": ffn,
        f"{name}.attention.head_count": 4,
        f"{name}.attention.head_count_kv": 2,
        f"{name}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{name}.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [3, 3, 1, 1, 1],
        "tokenizer.ggml.merges": ["h e", "Ġ he", "1 2"],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }
    shapes = {
        "token_embd.weight": (len(tokens), hidden),
        "output_norm.weight": (hidden,),
        "output.weight": (len(tokens), hidden),
    }
    for i in range(layers):
        part = f"blk.{i}."
        shapes |= {
            f"{part}attn_norm.weight": (hidden,),
            f"{part}ffn_norm.weight": (hidden,),
            f"{part}attn_q.weight": (hidden, hidden),
            f"{part}attn_k.weight": (kv, hidden),
            f"{part}attn_v.weight": (kv, hidden),
            f"{part}attn_output.weight": (hidden, hidden),
            f"{part}ffn_gate.weight": (ffn, hidden),
            f"{part}ffn_up.weight": (ffn, hidden),
            f"{part}ffn_down.weight": (hidden, ffn),
        }
    return Contents(values, {n: ("F32", s, bytes(4 * _product(s))) for n, s in shapes.items()})


def _product(shape: tuple[int, ...]) -> int:
    return shape[0] if len(shape) == 1 else shape[0] * _product(shape[1:])


def _padded(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _typed(value: object) -> bytes:
    if isinstance(value, list):
        kind = _kind(value[0])
        return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(map(_plain, value))
    return struct.pack("<I", _kind(value)) + _plain(value)


def _kind(value: object) -> int:
    return {bool: 7, int: 4, float: 6, str: 8}[type(value)]


def _plain(value: object) -> bytes:
    if isinstance(value, str):
        return _string(value)
    code = {bool: "?", int: "I", float: "f"}[type(value)]
    return struct.pack(f"<{code}", value)
