"""Checkpoints with quantised weights: transformers loads them, if its packages are installed.

Most methods need packages that transformers does not install. It names them one at a time and in
its own words for each method. This module names all missing ones at once, before any weight is
read.
"""

import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path

from transformers import PreTrainedConfig
from transformers.quantizers import AutoHfQuantizer

from engine.errors import CheckpointError

# Packages by quant_method; for other methods transformers names missing packages itself.
PACKAGES = {
    "awq": ("accelerate", "gptqmodel"),
    "bitsandbytes": ("accelerate", "bitsandbytes"),
    "compressed-tensors": ("compressed-tensors",),
    "fp8": ("accelerate",),
    "gptq": ("gptqmodel", "optimum"),
    "mxfp4": ("accelerate",),
    "torchao": ("torchao",),
}

PARTS = re.compile(  # tensor names that occur only with quantised weights
    r"\.(weight_scale(_inv|_2)?|input_scale|weight_packed|weight_shape|weight_zero_point"
    r"|qweight|qzeros|scales|g_idx|absmax|quant_map|SCB|(\w+_)?(blocks|scales))$"
)


def quant_method(config: PreTrainedConfig) -> str | None:
    """Returns the quantisation method that config.json names; None if the weights are not
    quantised.

    Raises CheckpointError for a method that transformers would ignore: it would load nonsense.
    """
    found = getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(decoder=True), "quantization_config", None
    )
    if found is None:
        return None
    method = found.get("quant_method")
    if method is None and (found.get("load_in_8bit") or found.get("load_in_4bit")):
        return "bitsandbytes"
    if method is None:
        raise CheckpointError("config.json: quantization_config has no quant_method")
    if not AutoHfQuantizer.supports_quant_method(found):
        raise CheckpointError(f"config.json: quant_method {method!r} is unknown to transformers")
    return method


def require_packages(method: str) -> None:
    """Raises CheckpointError if packages for this method are missing; the error names them."""
    names = PACKAGES.get(method, ())
    absent = [name for name in names if importlib.util.find_spec(name.replace("-", "_")) is None]
    if absent:
        raise CheckpointError(
            f"weights quantised with {method} cannot be loaded: not installed: {', '.join(absent)}"
        )


def check_plain(path: Path, left_over: Iterable[str]) -> None:
    """Raises CheckpointError if unexpected weights show that a model without a named method is
    quantised.
    """
    part = min((name for name in left_over if PARTS.search(name)), default=None)
    if part is not None:
        raise CheckpointError(
            f"{path}: its weights are quantised ({part}), but config.json does not say how in a "
            "quantization_config"
        )
