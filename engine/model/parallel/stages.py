"""Cuts a model into the stages of pipeline parallelism: consecutive layers of a decoder.

A rank keeps the layers of its stage. It receives hidden states from the previous stage before its
first layer, and sends hidden states to the next stage after its last layer. The model's own code
stays unchanged: layers of other stages return their input, the embedding of later stages returns
zeros, and the head of earlier stages returns one zero per token.

The stages compute one step one after the other. Steps of several batches do not overlap.

Source: Huang et al., "GPipe", 2019.
"""

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.model.parallel.group import RankGroup


class Passing(nn.Module):
    """Replaces a layer of another stage."""

    def forward(self, hidden: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """Returns the hidden states unchanged."""
        return hidden


class Blank(nn.Module):
    """Replaces an embedding or a head of another stage. It returns zeros [..., width]."""

    def __init__(self, width: int, dtype: torch.dtype, num_embeddings: int = 0) -> None:
        """`num_embeddings` is copied from the replaced embedding."""
        super().__init__()
        self.num_embeddings = num_embeddings
        self._width = width
        self._dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns zeros [..., n, width], for token ids [..., n] or hidden states [..., n,
        hidden].
        """
        shape = x.shape if not x.is_floating_point() else x.shape[:-1]
        return torch.zeros(*shape, self._width, dtype=self._dtype, device=x.device)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Returns the layers of the decoder, in order."""
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    return next(layers for layers in lists if len(layers) == num_layers)


def keep_stage(model: PreTrainedModel, group: RankGroup, dtype: torch.dtype) -> None:
    """Removes the parts of the model that other stages compute. Hidden states have the type
    `dtype`. Raises ConfigError.
    """
    layers = decoder_layers(model)
    own = group.place.layers(len(layers))
    if group.place.pp == 1:
        return
    for i in range(len(layers)):
        if i not in own:
            layers[i] = Passing()
    if not group.place.is_first_stage:
        embedding = model.get_input_embeddings()
        width = model.config.get_text_config(decoder=True).hidden_size
        _replace(model, embedding, Blank(width, dtype, embedding.num_embeddings))
        layers[own[0]].register_forward_pre_hook(_Receive(group), with_kwargs=True)
    if not group.place.is_last_stage:
        layers[own[-1]].register_forward_hook(_Send(group))
        _replace(model, model.get_output_embeddings(), Blank(1, dtype))


class _Receive:
    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def __call__(
        self, _layer: nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[torch.Tensor, ...], dict[str, object]]:
        hidden, *others = args
        return (self._group.receive(hidden), *others), kwargs


class _Send:
    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def __call__(
        self, _layer: nn.Module, _args: object, output: torch.Tensor | tuple[torch.Tensor, ...]
    ) -> None:
        self._group.send(output if isinstance(output, torch.Tensor) else output[0])


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module is old:
            parent_name, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent_name), last, new)
