"""Finds the length of a model's context from its rotary embeddings.

    default, llama3       max_position_embeddings, which names the whole context
    linear, proportional  that times the factor; Gemma names the product already
    yarn                  original_max_position_embeddings times the factor
    dynamic, longrope     they change beyond a length, see below

Layers of different types may have embeddings of different types. A layer with a window depends only
on distances, so the layers without a window determine the length of the context.

If embeddings change as a sequence grows, K and V of its earlier tokens become wrong. transformers
does not compute them again either. So the context ends where the embeddings change. If the operator
requests a longer context, the embeddings of the longest context are used from the first token on,
as in vLLM.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from engine.errors import CheckpointError

Rope = dict[str, Any]  # parameters of one type of rotary embeddings

CHANGING = ("dynamic", "longrope")
FACTORED = ("linear", "proportional", "dynamic")  # max_position_embeddings is multiplied
PRODUCT_NAMED = ("gemma3", "gemma4")  # their max_position_embeddings includes the factor


@dataclass(frozen=True, slots=True)
class ContextLength:
    """The context length of a model in tokens, and the reason for its limit.

    `is_stretched`: the model's embeddings must be made constant for this length.
    """

    served: int
    limit: str | None = None
    is_stretched: bool = False


def context_length(text: PreTrainedConfig, max_len: int | None) -> ContextLength:
    """Returns the context length that is served if the operator requests `max_len`. Raises
    CheckpointError.
    """
    named = getattr(text, "max_position_embeddings", None)
    if type(named) is not int or named < 1:
        raise CheckpointError("config.json: max_position_embeddings is missing")
    ropes = list(_ropes(text))
    lengths = [_longest(text, rope, named) for rope, sees_all in ropes if sees_all]
    longest = min(lengths, default=named)
    constant = min((_constant(rope, named, longest) for rope, _ in ropes), default=longest)
    if constant >= longest:
        return ContextLength(longest)
    names = " and ".join(sorted({rope["rope_type"] for rope, _ in ropes} & set(CHANGING)))
    if max_len is not None and max_len > constant:
        return ContextLength(
            longest,
            f"rotary embeddings of type {names} are computed for {longest} tokens from the first "
            "one on, so short prompts may get other answers than from transformers",
            is_stretched=True,
        )
    return ContextLength(
        constant,
        f"its context is limited to {constant} of {longest} tokens: rotary embeddings of type "
        f"{names} change there, which would leave K and V of earlier tokens wrong; with "
        f"max_model_len up to {longest} they are computed for long contexts throughout",
    )


def stretch(text: PreTrainedConfig) -> None:
    """Makes rotary embeddings constant that change with the length: those of the longest context
    are always used. No model may have been built from the config yet.
    """
    for rope, _ in _ropes(text):
        if rope["rope_type"] == "longrope":
            rope["short_factor"] = rope["long_factor"]
        elif rope["rope_type"] == "dynamic":
            factor, size = rope.pop("factor"), _rotated_size(text, rope)
            # The formula of transformers, at `factor` times the original length.
            grown = factor**2 - (factor - 1)
            rope["rope_theta"] *= grown ** (size / (size - 2))
            rope["rope_type"] = "default"


def _ropes(text: PreTrainedConfig) -> Iterator[tuple[Rope, bool]]:
    """Yields the parameters of each type of rotary embeddings, and True if layers of this type have
    no window.
    """
    found = getattr(text, "rope_parameters", None) or {}
    nested = {name: value for name, value in found.items() if isinstance(value, dict)}
    if not nested and found:
        nested = {"": found}
    for name, rope in nested.items():
        rope.setdefault("rope_type", rope.get("type", "default"))
        yield rope, "sliding" not in name


def _longest(text: PreTrainedConfig, rope: Rope, named: int) -> int:
    """Returns the length of the longest context for which these embeddings are defined."""
    factor = _number(rope, "factor", 1.0)
    if rope["rope_type"] in ("yarn", "longrope"):
        original = _number(rope, "original_max_position_embeddings", named)
        return max(named, int(original * factor))
    if rope["rope_type"] in FACTORED and not text.model_type.startswith(PRODUCT_NAMED):
        return int(named * max(1.0, factor))
    return named


def _constant(rope: Rope, named: int, longest: int) -> int:
    """Returns the length up to which these embeddings stay constant."""
    if rope["rope_type"] == "longrope":
        return min(longest, int(_number(rope, "original_max_position_embeddings", named)))
    return named if rope["rope_type"] == "dynamic" else longest


def _rotated_size(text: PreTrainedConfig, rope: Rope) -> int:
    """Returns the number of elements of a head that are rotated."""
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(head_dim * _number(rope, "partial_rotary_factor", 1.0))


def _number(rope: Rope, key: str, default: float) -> float:
    """Returns a positive number from the parameters; the default if the key is missing."""
    value = rope.get(key)
    return value if type(value) in (int, float) and value > 0 else default
