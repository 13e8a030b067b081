"""Cuts a model into the slices of tensor parallelism, and its experts into shares.

For each of its models, transformers has a plan for splitting the layers (`base_model_tp_plan`). The
plan names a style for modules and bare parameters. The style determines what a rank keeps and
computes:

    colwise                 rows of the weight: some outputs. Q, K and V: whole heads
    colwise_gather_output   the same; the outputs of all ranks are joined
    rowwise                 columns of the weight, for the inputs that it has; results are summed
    rowwise_split_input     the same, of inputs that all ranks have whole
    packed_colwise          rows of both halves of a weight, such as gate and up
    grouped_gemm            whole experts
    moe_tp_experts          the module's results are summed
    ep_dispatch_experts     the same; tokens of experts elsewhere are left out
    replicated…             everything

Embeddings are not split: their rows are read, not multiplied, and a split lookup would need a sum
over the ranks in every step. A model without a plan, or with a style that is not in this list, is
refused.

Weights of a file are mapped, and read only when they are used. So a rank reads only its slices.

Sources: Shoeybi et al., "Megatron-LM", 2019; transformers, `distributed/tensor_parallel.py`.
"""

import re
from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.errors import CheckpointError, ConfigError
from engine.model.parallel.group import RankGroup
from engine.model.parallel.stages import Blank
from engine.worker.ranks import RankPlace

KV_PROJECTIONS = ("k_proj", "v_proj")
WHOLE = frozenset(
    {"embedding_rowwise", "replicated_with_grad_allreduce", "replicate", "mla_kv_a_proj"}
)
JOINED = frozenset({"colwise_gather_output", "colwise_rep"})
SPLIT_INPUT = frozenset({"rowwise_split_input", "rowwise_rep"})


class Joined(nn.Module):
    """A linear layer with this rank's outputs. It joins the outputs of the other ranks to them."""

    def __init__(self, linear: nn.Linear, num_outputs: int, group: RankGroup) -> None:
        super().__init__()
        self.linear = linear
        self.out_features = num_outputs
        self._group = group
        self._share = -(-num_outputs // group.place.tp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies [..., inputs]. Returns the outputs of all ranks, [..., out_features]."""
        y = self.linear(x)
        if y.shape[-1] < self._share:
            y = nn.functional.pad(y, (0, self._share - y.shape[-1]))
        return self._group.join(y)[..., : self.out_features]


class Summed(nn.Module):
    """A linear layer with this rank's inputs. Its products are summed over the ranks."""

    def __init__(
        self,
        linear: nn.Linear,
        bias: torch.Tensor | None,
        group: RankGroup,
        inputs: slice | None = None,
    ) -> None:
        """`bias` is added to the sum. If the layer is called with the inputs of all ranks, `inputs`
        selects this rank's part.
        """
        super().__init__()
        self.linear = linear
        self.register_buffer("bias", bias)
        self._group = group
        self._inputs = inputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies [..., inputs]. Returns the sum over the ranks, [..., outputs]."""
        if self._inputs is not None:
            x = x[..., self._inputs]
        y = self._group.sum(self.linear(x))
        return y if self.bias is None else y + self.bias


class SummedExperts(nn.Module):
    """Experts that are divided among the ranks: each rank has a slice of all experts, or some
    experts.
    """

    def __init__(self, experts: nn.Module, group: RankGroup, own: range | None) -> None:
        """`own` are the experts that this rank has as a whole; None: it has slices of all
        experts.
        """
        super().__init__()
        self.experts = experts
        self._group = group
        self._own = own

    def forward(
        self, hidden: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor
    ) -> torch.Tensor:
        """Computes the sum of the experts' results. Chosen experts and their shares are both
        [num_tokens, top_k].
        """
        if self._own is not None:
            # Experts of transformers skip the index after the last expert. Its share is zero.
            is_own = (chosen >= self._own.start) & (chosen < self._own.stop)
            chosen = torch.where(is_own, chosen - self._own.start, len(self._own))
            shares = shares.masked_fill(~is_own, 0.0)
        return self._group.sum(self.experts(hidden, chosen, shares))


def cut(model: PreTrainedModel, group: RankGroup) -> None:
    """Replaces each layer of `model` by this rank's slice.

    Raises CheckpointError if transformers has no plan for the model, ConfigError if heads or
    experts cannot be divided among the ranks.
    """
    place = group.place
    if place.tp == 1:
        return
    text = model.config.get_text_config(decoder=True)
    plan = dict(getattr(model, "_tp_plan", None) or {})
    if not any(style.startswith("colwise") and name != "lm_head" for name, style in plan.items()):
        raise CheckpointError(f"config.json: model_type {text.model_type!r} has no plan for tp")
    if place.ep > 1:
        of_experts = getattr(model, "_ep_plan", None)
        if not of_experts:
            raise CheckpointError(f"config.json: model_type {text.model_type!r} has no plan for ep")
        plan |= of_experts
    num_heads = getattr(text, "num_attention_heads", 0)
    if num_heads % place.tp:
        raise ConfigError(f"{num_heads} attention heads cannot be shared by {place.tp} ranks")
    styles = list(_styles(model, plan))
    for name, style in styles:  # parameters come before their modules
        parent_name, _, last = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        whole = getattr(parent, last)
        if isinstance(whole, nn.Parameter):
            _check_experts(parent)
            setattr(parent, last, _parameter(whole, style, place))
            if style == "grouped_gemm":
                parent.num_experts = len(getattr(parent, last))
                # The code of transformers then skips tokens of other ranks' experts.
                parent._is_expert_parallel = True
        elif style not in WHOLE and not isinstance(whole, Blank):
            setattr(parent, last, _module(whole, last, style, group, text))
    _set_groups(model, place)


def _check_experts(experts: nn.Module) -> None:
    """Raises CheckpointError if `_parameter` cannot cut the layout of the experts' parameters."""
    strange = {"has_bias": True, "is_transposed": True, "is_concatenated": False}
    for name, value in strange.items():
        if getattr(experts, name, None) is value:
            raise CheckpointError(f"experts whose {name} is {value} cannot be shared by ranks")


def _styles(model: nn.Module, plan: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yields the names of parameters and modules that the plan mentions, with the style of each."""
    patterns = [(re.compile(_pattern(name)), style) for name, style in plan.items()]
    names = [
        name for name, _ in model.named_parameters() if not name.endswith((".weight", ".bias"))
    ]
    modules = [name for name, _ in model.named_modules()]
    for name in (*names, *reversed(modules)):  # children before their parents
        style = next((style for pattern, style in patterns if pattern.fullmatch(name)), None)
        if style is not None:
            yield name, style


def _pattern(name: str) -> str:
    return re.escape(name).replace(r"\*", r"\d+")


def _parameter(whole: nn.Parameter, style: str, place: RankPlace) -> nn.Parameter:
    """Returns this rank's slice of a bare parameter, such as a parameter of experts: [experts,
    outputs, inputs].
    """
    if style == "grouped_gemm":
        if len(whole) % place.ep:
            raise ConfigError(f"{len(whole)} experts cannot be shared by {place.ep} ranks")
        sliced = whole[slice_of(place.share(len(whole)))]
    elif style == "packed_colwise":
        halves = whole.unflatten(-2, (2, -1))
        own = halves[..., slice_of(place.share(halves.shape[-2])), :]
        sliced = own.flatten(-3, -2)
    elif style == "colwise":
        sliced = whole[..., slice_of(place.share(whole.shape[-2])), :]
    elif style == "rowwise":
        sliced = whole[..., slice_of(place.share(whole.shape[-1]))]
    else:
        raise CheckpointError(f"its plan for tp has the style {style!r} for a parameter")
    return nn.Parameter(sliced.contiguous(), requires_grad=False)


def _module(whole: nn.Module, last: str, style: str, group: RankGroup, text: object) -> nn.Module:
    """Returns this rank's part of a module that the plan mentions."""
    place = group.place
    if style == "moe_tp_experts":
        return SummedExperts(whole, group, None)
    if style == "ep_dispatch_experts":
        return SummedExperts(whole, group, place.share(whole.num_experts * place.ep))
    if type(whole) is not nn.Linear:
        raise CheckpointError(f"its plan for tp splits a {type(whole).__name__}")
    if style == "colwise":
        if last in KV_PROJECTIONS:
            num_heads = text.num_key_value_heads
            heads = place.kv_heads(num_heads)
            each = whole.out_features // num_heads
            return rows_of(whole, range(heads.start * each, heads.stop * each))
        return rows_of(whole, place.share(whole.out_features))
    if style in JOINED:
        return Joined(rows_of(whole, place.share(whole.out_features)), whole.out_features, group)
    if style in ("rowwise", *SPLIT_INPUT):
        own = place.share(whole.in_features)
        inputs = slice_of(own) if style in SPLIT_INPUT else None
        bias = None if whole.bias is None else whole.bias.detach()
        return Summed(_columns_of(whole, own), bias, group, inputs)
    if style == "packed_colwise":
        half = place.share(whole.out_features // 2)
        return _linear(*(_halves(x, half) for x in (whole.weight, whole.bias)))
    raise CheckpointError(f"its plan for tp has the style {style!r}")


def rows_of(whole: nn.Linear, rows: range) -> nn.Linear:
    """Returns a copy of the layer that has only these outputs."""
    own = slice_of(rows)
    return _linear(whole.weight[own], None if whole.bias is None else whole.bias[own])


def _columns_of(whole: nn.Linear, columns: range) -> nn.Linear:
    return _linear(whole.weight[:, slice_of(columns)].contiguous(), None)


def _halves(x: torch.Tensor | None, own: range) -> torch.Tensor | None:
    if x is None:
        return None
    return x.unflatten(0, (2, -1))[:, slice_of(own)].flatten(0, 1)


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return linear.eval()


def slice_of(places: range) -> slice:
    """Returns a range of indices as a slice."""
    return slice(places.start, places.stop)


def _set_groups(model: nn.Module, place: RankPlace) -> None:
    """Sets the number of query heads per KV head in this rank's attention layers. The number is
    smaller if there are more ranks than KV heads.
    """
    for module in model.modules():
        groups = getattr(module, "num_key_value_groups", None)
        config = getattr(module, "config", None)
        total = getattr(config, "num_key_value_heads", None)
        if isinstance(groups, int) and total and place.tp > total:
            module.num_key_value_groups = groups * total // place.tp
