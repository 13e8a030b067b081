"""Reads the weights of a GGUF file, one weight whenever transformers requests it.

F32, F16 and BF16 keep their type. Other types store blocks of 32 values, which become fp32 by the
definition of the format (d and m are fp16):

    Q8_0    d, 32 signed bytes q          value = d q
    Q4_0    d, 16 bytes: 32 numbers q     value = d (q - 8)
    Q4_1    d, m, 16 bytes: the same      value = d q + m

The low halves of the 16 bytes are the first 16 values. The high halves are the last 16 values.
"""

from pathlib import Path

import numpy as np
import torch

from engine.gguf.architecture import WeightPlace, weights_of
from engine.gguf.container import BLOCKS, TensorPlace, read_gguf

AS_STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class LazyWeight:
    """A weight that is read from the file when it is indexed, like a slice of a safetensors
    file.
    """

    def __init__(self, path: Path, place: WeightPlace) -> None:
        self._path, self._place = path, place

    def __getitem__(self, index: object) -> torch.Tensor:
        weight = read_tensor(self._path, self._place.tensor)
        if self._place.rotated_heads is not None:
            weight = in_halves(weight, self._place.rotated_heads)
        return weight[index]


def lazy_weights(path: Path) -> dict[str, LazyWeight]:
    """Returns the file's weights, by transformers' names. Raises CheckpointError."""
    return {name: LazyWeight(path, place) for name, place in weights_of(read_gguf(path)).items()}


def read_tensor(path: Path, place: TensorPlace) -> torch.Tensor:
    """Returns a tensor in its stored type, or in fp32 if it is stored in blocks."""
    data = np.fromfile(path, np.uint8, place.num_bytes, offset=place.begin)
    if place.type_name in AS_STORED:
        return torch.from_numpy(data).view(AS_STORED[place.type_name]).reshape(place.shape)
    blocks = data.reshape(-1, BLOCKS[place.type_name][1])
    return torch.from_numpy(_VALUES[place.type_name](blocks)).reshape(place.shape)


def in_halves(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorders the rows of each head for transformers' rotation: pairs [a0 b0 a1 b1 …] become
    halves [a b].

    `rows` is [num_heads * head_dim, ...].
    """
    pairs = rows.reshape(num_heads, len(rows) // num_heads // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    return _fp16(blocks[:, :2]) * blocks[:, 2:].view(np.int8)


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    return _fp16(blocks[:, :2]) * (_halves(blocks[:, 2:]).astype(np.int8) - np.int8(8))


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    return _fp16(blocks[:, :2]) * _halves(blocks[:, 4:]) + _fp16(blocks[:, 2:4])


def _halves(data: np.ndarray) -> np.ndarray:
    """Unpacks [num_blocks, 16] bytes to [num_blocks, 32] numbers of four bits each."""
    return np.concatenate([data & 15, data >> 4], axis=1)


def _fp16(data: np.ndarray) -> np.ndarray:
    """Reads [num_blocks, 2] bytes as [num_blocks, 1] fp16 numbers."""
    return np.ascontiguousarray(data).view("<f2").astype(np.float32)


_VALUES = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1}
