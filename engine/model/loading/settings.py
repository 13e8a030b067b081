"""Checks values of config.json before a model is built, so that errors appear early. Needs no
torch.

The worker would refuse wrong values too, but later, and with transformers' messages.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError

FILE = "config.json"
LENGTH = "max_position_embeddings"
DTYPES = ("float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2")
DTYPE_KEYS = ("dtype", "torch_dtype")
ACTIVATION_KEYS = ("hidden_act", "hidden_activation", "activation_function")
ACTIVATIONS = frozenset(  # names of activation functions in transformers
    {
        *("gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python"),
        *("gelu_python_tanh", "gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu"),
        *("linear", "mish", "prelu", "quick_gelu", "relu", "relu2", "relu6", "sigmoid"),
        *("silu", "sqrtsoftplus", "swish", "tanh", "xielu"),
    }
)
ROPE_KEYS = ("rope_parameters", "rope_scaling")
ROPE_TYPES = frozenset(  # names in transformers, also former names and names in single models
    {
        *("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"),
        *("axial", "ntk_alpha", "xdrope", "mrope", "su"),
    }
)


def check_settings(path: Path, config: object) -> None:
    """Raises CheckpointError, in one sentence, for a value that no model can have."""
    where = path / FILE
    if not isinstance(config, dict):
        raise CheckpointError(f"{where}: not a JSON object")
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    length = text.get(LENGTH, 1)
    if type(length) is not int or length < 1:
        raise CheckpointError(f"{where}: {LENGTH} is {_said(length)}, not a number of tokens")
    for part in (config, text):
        if not _is_ids(part.get("eos_token_id")):
            found = _said(part["eos_token_id"])
            raise CheckpointError(
                f"{where}: eos_token_id is {found}, not a token's number or a list of them"
            )
        for key in DTYPE_KEYS:
            if part.get(key) is not None and not _is_dtype(part[key]):
                known = ", ".join(DTYPES[:3])
                found = _said(part[key])
                raise CheckpointError(f"{where}: {key} is {found}; it names a type such as {known}")
    _check_names(where, text)


def _check_names(where: Path, text: dict[str, Any]) -> None:
    """Raises CheckpointError for names that transformers does not know."""
    for key in ACTIVATION_KEYS:
        name = text.get(key)
        if isinstance(name, str) and name not in ACTIVATIONS:
            raise CheckpointError(f"{where}: {key} is {name!r}, an unknown activation")
    for key, name in _rope_types(text):
        if name not in ROPE_TYPES:
            known = ", ".join(sorted(ROPE_TYPES))
            raise CheckpointError(
                f"{where}: {key} has the type {_said(name)}, which is none of: {known}"
            )


def _rope_types(text: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """Yields the types of rotary embeddings with their keys. They may be nested under layer
    types.
    """
    for key in ROPE_KEYS:
        found = text.get(key)
        if isinstance(found, dict):
            nested = [value for value in found.values() if isinstance(value, dict)]
            for rope in nested or [found]:
                name = rope.get("rope_type", rope.get("type"))
                if name is not None:
                    yield key, name


def _is_ids(value: object) -> bool:
    values = value if isinstance(value, list) else [value]
    return value is None or all(type(each) is int for each in values)


def _is_dtype(value: object) -> bool:
    return isinstance(value, str) and value.removeprefix("torch.") in DTYPES


def _said(value: object) -> str:
    """Returns the value as shortened JSON."""
    return "null" if value is None else f"{value!r:.60}"
