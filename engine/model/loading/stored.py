"""Keeps weights in the dtype of their file and computes with them in fp32.

A checkpoint in bf16 that is loaded as fp32 needs twice its size before any weight is packed. To
avoid this:

1. `as_stored`: within this context, transformers leaves every tensor in the dtype of its file.
2. `widen_in_use`: from then on each module has its own weights in fp32 only while it runs. So the
   model can be tried in the memory of its file and of one module in fp32. Weights that other
   modules read as well become fp32 permanently (`probe`, `widen_own`).
3. Code that packs a weight reads it in the dtype of the file. `widen` then makes the other weights
   fp32 permanently.

fp32 represents every number of bf16 and fp16, so results are bit for bit equal to a model loaded as
fp32. The model is also built as for fp32: values that the model computes itself (rotary
frequencies, the factor of an embedding) are in no file and must not lose bits.

**A device.** `one_device_maps` loads weights straight to a device. Without a device map,
transformers loads all weights into host memory, and they would have to be copied to the device.
With a device map, transformers copies each tensor to the device when it reads it. But then it
requires the package accelerate, which it needs only for maps of several devices.

**Quantised weights.** transformers loads them if the packages for their method are installed. Most
methods need packages that transformers does not install. transformers names missing packages one at
a time, with a different message for each method. This module names all missing packages at once,
before any weight is read.
"""

import importlib.util
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations import accelerate
from transformers.quantizers import AutoHfQuantizer

from engine.errors import CheckpointError

ATTRIBUTE = "baton_widening"


@contextmanager
def as_stored() -> Iterator[None]:
    """Returns a context in which `from_pretrained` casts no tensor. `dtype` applies to tensors that
    the model creates.

    The context uses transformers' plan of exceptions, where None means no cast. A dtype argument
    would apply to all tensors, although a checkpoint in bf16 may contain a few tensors in fp32.
    """
    plan = PreTrainedModel._get_dtype_plan
    PreTrainedModel._get_dtype_plan = lambda _model, _dtype: {"*": None}
    try:
        yield
    finally:
        PreTrainedModel._get_dtype_plan = plan


def widen_in_use(model: nn.Module) -> None:
    """Makes the model compute in fp32 from now on, whatever the dtype of its stored weights."""
    for module in model.modules():
        if _stored(module):
            setattr(module, ATTRIBUTE, _Widening(module))


def widen(model: nn.Module) -> None:
    """Turns weights that were fp32 only in use into fp32 weights, one at a time. Other weights
    stay.
    """
    for module in model.modules():
        widen_own(module)


def widen_own(module: nn.Module) -> None:
    """Widens the module's own weights permanently. The module must not be running."""
    widening = vars(module).pop(ATTRIBUTE, None)
    if widening is not None:
        widening.end()
        for tensor in _stored(module):
            _set(tensor, tensor.data.float())


class _Widening:
    """Makes a module's weights fp32 while the module runs. Keeps no reference to them at other
    times.
    """

    def __init__(self, module: nn.Module) -> None:
        self._handles = (
            module.register_forward_pre_hook(self._before),
            module.register_forward_hook(self._after, always_call=True),
        )
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, _args: object) -> None:
        for tensor in _stored(module):
            self._kept.append((tensor, tensor.data))
            _set(tensor, tensor.data.float())

    def _after(self, _module: nn.Module, _args: object, _output: object) -> None:
        while self._kept:
            _set(*self._kept.pop())


def _stored(module: nn.Module) -> list[torch.Tensor]:
    """Returns the module's own weights and buffers of floating point types other than fp32."""
    tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return [x for x in tensors if x.is_floating_point() and x.dtype is not torch.float32]


def _set(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Replaces the data of a weight in place, so that tied weights stay tied."""
    tensor.data = data


@contextmanager
def one_device_maps() -> Iterator[None]:
    """Returns a context in which `from_pretrained` accepts a map of one device without the package
    accelerate.
    """
    is_available = accelerate.is_accelerate_available
    accelerate.is_accelerate_available = lambda *_: True
    try:
        yield
    finally:
        accelerate.is_accelerate_available = is_available


# Packages by quant_method. For methods not listed here, transformers names missing packages.
PACKAGES = {
    "awq": ("accelerate", "gptqmodel"),
    "bitsandbytes": ("accelerate", "bitsandbytes"),
    "compressed-tensors": ("compressed-tensors",),
    "fp8": ("accelerate",),
    "gptq": ("gptqmodel", "optimum"),
    "mxfp4": ("accelerate",),
    "torchao": ("torchao",),
}

PARTS = re.compile(  # names of tensors that exist only in quantised checkpoints
    r"\.(weight_scale(_inv|_2)?|input_scale|weight_packed|weight_shape|weight_zero_point"
    r"|qweight|qzeros|scales|g_idx|absmax|quant_map|SCB|(\w+_)?(blocks|scales))$"
)


def quant_method(config: PreTrainedConfig) -> str | None:
    """Returns the quantisation method that config.json names; None if the weights are not
    quantised.

    Raises CheckpointError for a method that transformers would ignore, because the loaded weights
    would be nonsense.
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
    """Raises CheckpointError, which names the packages, if packages for this method are missing."""
    names = PACKAGES.get(method, ())
    absent = [name for name in names if importlib.util.find_spec(name.replace("-", "_")) is None]
    if absent:
        raise CheckpointError(
            f"weights quantised with {method} cannot be loaded: not installed: {', '.join(absent)}"
        )


def check_plain(path: Path, left_over: Iterable[str]) -> None:
    """Raises CheckpointError if unexpected weights reveal that a model is quantised although its
    config names no method.
    """
    part = min((name for name in left_over if PARTS.search(name)), default=None)
    if part is not None:
        raise CheckpointError(
            f"{path}: its weights are quantised ({part}), but config.json does not say how in a "
            "quantization_config"
        )
