"""Changes of the logits before a token is chosen, and before temperature and bounds.

All arithmetic is in fp32, and each operation is rounded by itself. First all logits of the row are
limited to finite numbers. Then come these steps. The result of each step is limited in the same
way, for the ids that the step changes:

    1  repetition  of ids in prompt or answer: x / penalty where x > 0, else x * penalty
    2  frequency   of ids in the answer: x - penalty * (how often it is there)
    3  presence    of ids in the answer: x - penalty
    4  bias        x + bias; of several biases for one id, the last counts
    5  mask        banned ids, and ids that a grammar does not allow: minus infinity

So if any id is allowed, an allowed id is chosen. Penalties and biases are limited in the same way.

A batch needs only a few operations, over all rows whose logits change. On a GPU, one copy brings
ids, numbers and masks to the device. `reference_changed` does the same in plain Python, and
`src/kernels/changes.h` in C++.

Source of the repetition penalty: Keskar et al., "CTRL", 2019, §4.1.
"""

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from ctypes import c_float

import msgspec
import numpy as np
import torch

from engine.messages import Sampling
from engine.model.memory import brought

GREATEST = 2.0**128 - 2.0**104  # the largest finite number in fp32
WORD_BITS = 32
ALL_BITS = 0xFFFFFFFF


# Created five times as fast as a dataclass.
class TokenChoice(msgspec.Struct, frozen=True, eq=False):
    """How to choose from one row of logits: the token at `position`, with these sampling
    parameters.

        `banned`      ids that are never chosen
        `history`     all tokens before `drafted`, prompt and answer; optional without penalties
        `drafted`     tokens that are assumed to follow `history`
        `prompt_len`  where the answer begins in these two together
        `mask`        uint32 [words]: id i is allowed if bit i % 32 of word i // 32 is set; no id
                      beyond the words is; None allows all
    """

    sampling: Sampling
    position: int
    banned: Sequence[int] = ()
    history: "array[int] | Sequence[int] | None" = None
    drafted: Sequence[int] = ()
    prompt_len: int = 0
    mask: np.ndarray | None = None

    @property
    def is_plain(self) -> bool:
        """True if this choice leaves the logits unchanged."""
        return (
            not self.banned
            and self.mask is None
            and not self.sampling.logit_bias
            and not self.sampling.has_penalties
        )


def changed(logits: torch.Tensor, choices: Sequence[TokenChoice]) -> torch.Tensor:
    """Returns `logits`, changed by the choices. Returns the same tensor if no choice changes
    logits.
    """
    rows = [row for row, choice in enumerate(choices) if not choice.is_plain]
    if not rows:
        return logits
    changing = [choices[row] for row in rows]
    index, prompt, answer, penalties, biased, biases, banned, words = _brought(
        [np.array(rows), *_contexts(changing, logits.shape[1]), *_marks(changing, logits.shape[1])],
        logits.device,
    )
    logits = logits.float()
    x = _finite(logits[index])  # [num_changing, vocab]
    flat = x.view(-1)
    if len(prompt) or len(answer):
        flat.copy_(_penalised(x, prompt, answer, penalties.view(torch.float64)).view(-1))
    if len(biased):
        fp32 = biases.view(torch.float64).float()
        flat.index_copy_(0, biased, _finite(flat[biased] + fp32))
    if len(words):
        x.masked_fill_(~_allowed(words.view(len(rows), -1), x.shape[1]), -torch.inf)
    flat.index_fill_(0, banned, -torch.inf)
    return logits.index_copy(0, index, x)


def _contexts(choices: Sequence[TokenChoice], vocab: int) -> list[np.ndarray]:
    """Returns the indices, in the flat logits, of the ids in prompts and answers. Also returns the
    penalties [3, num_rows].
    """
    prompts, answers = [], []
    for choice in choices:
        context = np.empty(0, np.int64)
        if choice.sampling.has_penalties:
            parts = ([] if choice.history is None else choice.history, choice.drafted)
            context = np.concatenate([np.asarray(part, np.int64) for part in parts])
        prompts.append(context[: choice.prompt_len])
        answers.append(context[choice.prompt_len :])
    samplings = [choice.sampling for choice in choices]
    penalties = [
        [limited(sampling.repetition_penalty) for sampling in samplings],
        [limited(sampling.frequency_penalty) for sampling in samplings],
        [limited(sampling.presence_penalty) for sampling in samplings],
    ]
    return [_places(prompts, vocab), _places(answers, vocab), np.array(penalties, np.float64)]


def _marks(choices: Sequence[TokenChoice], vocab: int) -> list[np.ndarray]:
    """Returns four arrays: indices of biased ids in the flat logits, biases, indices of banned ids,
    and masks as words.

    The masks cover all rows; the array is empty if no row has a mask.
    """
    biases = [dict(choice.sampling.logit_bias) for choice in choices]
    words = np.empty((0, 2), np.uint32)
    if any(choice.mask is not None for choice in choices):
        words = np.stack([_whole_mask(choice.mask, vocab) for choice in choices])
    return [
        _places([list(row) for row in biases], vocab),
        np.array([limited(bias) for row in biases for bias in row.values()], np.float64),
        _places([choice.banned for choice in choices], vocab),
        words,
    ]


def limited(number: float) -> float:
    """Limits a penalty or bias to the range of finite fp32 numbers, before it is rounded."""
    return min(max(number, -GREATEST), GREATEST)


def _places(ids: Sequence[Sequence[int]], vocab: int) -> np.ndarray:
    """Returns the indices of each row's ids in the flat logits. Raises IndexError."""
    flat = np.concatenate([np.asarray(row, np.int64) for row in ids])
    if flat.size and (flat.min() < 0 or flat.max() >= vocab):
        raise IndexError(f"ids {flat.min()} … {flat.max()} of a vocabulary of {vocab}")
    return flat + np.repeat(np.arange(len(ids)), [len(row) for row in ids]) * vocab


def _whole_mask(mask: np.ndarray | None, vocab: int) -> np.ndarray:
    """Returns a mask's words, extended to cover all ids. The number of words is even."""
    num_words = -(-vocab // (2 * WORD_BITS)) * 2
    if mask is None:
        return np.full(num_words, ALL_BITS, np.uint32)
    whole = np.zeros(num_words, np.uint32)
    whole[: len(mask)] = mask[:num_words]
    return whole


def _brought(arrays: Sequence[np.ndarray], device: torch.device) -> Sequence[torch.Tensor]:
    """Copies all arrays to `device` in one copy. Returns them flat, as int64."""
    flat = [np.ascontiguousarray(each).reshape(-1).view(np.int64) for each in arrays]
    return brought(np.concatenate(flat), device).split([len(each) for each in flat])


def _penalised(
    x: torch.Tensor,  # [num_rows, vocab] fp32
    prompt: torch.Tensor,  # places in the flat `x`
    answer: torch.Tensor,
    penalties: torch.Tensor,  # [3 * num_rows] fp64
) -> torch.Tensor:
    """Applies penalties. Penalties are tensors, because a GPU would multiply by the reciprocal of a
    plain number.
    """
    repetition, frequency, presence = penalties.float().view(3, len(x), 1)
    ones = torch.ones_like(answer, dtype=torch.int32)
    flat_counts = torch.zeros(x.numel(), dtype=torch.int32, device=x.device)
    counts = flat_counts.scatter_add_(0, answer, ones).view_as(x)
    in_answer = counts > 0
    in_context = in_answer.view(-1).index_fill(0, prompt, value=True).view_as(x)
    repeated = torch.where(x > 0, x / repetition, x * repetition)
    x = torch.where(in_context, _finite(repeated), x)
    less_frequent = _finite(x - frequency * counts.float())
    return torch.where(in_answer, _finite(less_frequent - presence), x)


def _finite(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-GREATEST, GREATEST)


def _allowed(words: torch.Tensor, vocab: int) -> torch.Tensor:
    """Unpacks words [num_rows, num_words / 2] int64 to bits [num_rows, vocab]."""
    bits = torch.arange(WORD_BITS, dtype=torch.int32, device=words.device)
    return ((words.view(torch.int32)[..., None] >> bits) & 1).bool().flatten(1)[:, :vocab]


def reference_changed(logits: Sequence[float], choice: TokenChoice) -> list[float]:
    """Defines `changed` for one row, in plain Python.

    Python computes in fp64. One operation on two fp32 numbers in fp64, rounded to fp32, gives the
    same result as in fp32.
    """
    sampling = choice.sampling
    x = [_finite_fp32(value) for value in logits]
    if sampling.has_penalties:
        repetition = _finite_fp32(sampling.repetition_penalty)
        frequency = _finite_fp32(sampling.frequency_penalty)
        presence = _finite_fp32(sampling.presence_penalty)
        context = [*(choice.history or ()), *choice.drafted]
        for i in Counter(context):
            x[i] = _finite_fp32(x[i] / repetition if x[i] > 0 else x[i] * repetition)
        for i, count in Counter(context[choice.prompt_len :]).items():
            x[i] = _finite_fp32(x[i] - c_float(frequency * count).value)
            x[i] = _finite_fp32(x[i] - presence)
    for i, bias in dict(sampling.logit_bias).items():
        x[i] = _finite_fp32(x[i] + _finite_fp32(bias))
    return [
        value if i not in choice.banned and _is_allowed(i, choice.mask) else -math.inf
        for i, value in enumerate(x)
    ]


def _finite_fp32(value: float) -> float:
    return limited(c_float(value).value)


def _is_allowed(token_id: int, mask: np.ndarray | None) -> bool:
    if mask is None:
        return True
    word, bit = divmod(token_id, WORD_BITS)
    return word < len(mask) and bool(mask[word] >> np.uint32(bit) & np.uint32(1))
