"""Mixtures of experts over packed weights.

    PackedExperts  replaces the module that transformers has for most models
    PackedGlu      replaces DBRX's, whose weights are rows of three matrices
    PackedRuns     replaces JetMoE's, which multiplies each run of rows by one matrix

Modules are recognised by their parameters and methods, not by the name of the model.

transformers has one module for all experts of a layer, with parameters [num_experts, outputs,
inputs] (transposed in some models). It calls the module with tokens, the experts chosen for each
token, and the experts' shares. Its `ExpertsInterface` allows other code to do the computation, by a
name that is set for all modules of a config. But the modules of a quantised checkpoint must keep
their own computation. So the whole module is replaced here, like a linear layer. `holds_experts`
checks for the attributes that `PackedExperts` uses.

The pairs of a token and one of its experts are computed expert by expert. Each token's results are
added up in the order in which the router names the experts, so nothing depends on other tokens.

Routers are never quantised, because their decisions are discrete. Most routers multiply by a bare
parameter, with `F.linear`, in the middle of the model's own code: see `native.invariant`.
"""

from collections.abc import Iterable, Iterator, Sequence
from inspect import signature
from itertools import accumulate, pairwise

import torch
from torch import nn

from engine.config import WeightFormat
from engine.model.native.matrix import PackedMatrix, Team

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
GLU_WEIGHTS = ("w1", "v1", "w2")
Run = tuple[int, int, int]  # (number of the expert, its first row, the row after its last)


class PackedExperts(nn.Module):
    """Replaces a module for which `holds_experts` is true, for fp32 activations on a CPU."""

    def __init__(self, experts: nn.Module, team: Team, form: WeightFormat) -> None:
        """Moves the weights out of `experts`, whose activation and gating are still used."""
        super().__init__()
        self.num_experts = experts.down_proj.shape[0]
        self.experts = experts
        self._has_gate = getattr(experts, "has_gate", True)
        self._has_norm = getattr(experts, "has_post_expert_norm", False)
        self._first = _take(experts, "gate_up_proj" if self._has_gate else "up_proj", team, form)
        self._second = _take(experts, "down_proj", team, form)
        self._team = team

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of the weights and of their scales."""
        return sum(matrix.num_bytes for matrix in (*self._first, *self._second))

    def forward(
        self,
        hidden_states: torch.Tensor,  # [num_tokens, hidden]
        top_k_index: torch.Tensor,  # experts of each token
        top_k_weights: torch.Tensor,  # [num_tokens, top_k]: shares of these experts
    ) -> torch.Tensor:
        """Returns the weighted sum of the experts' results, [num_tokens, hidden].

        The index after the last expert means an expert whose result is zero.
        """
        num_tokens, top_k = top_k_index.shape
        chosen = top_k_index.reshape(-1)
        order = chosen.argsort(stable=True)  # (token, expert) pairs, sorted by expert
        ends = chosen.bincount(minlength=self.num_experts).cumsum(0).tolist()
        runs = _runs(ends)
        if len(runs) and runs[-1][0] == self.num_experts:
            del runs[-1]  # the experts of these tokens are on other ranks
        x = hidden_states.index_select(0, order // top_k)
        x = self._activated(_products(self._first, x, runs, self._team))
        x = _products(self._second, x, runs, self._team)
        if self._has_norm:
            x = self.experts.post_expert_norm(x)
        results = torch.empty_like(x).index_copy_(0, order, x).view(num_tokens, top_k, -1)
        results *= top_k_weights[..., None]
        total = results[:, 0]
        for slot in range(1, top_k):
            total += results[:, slot]
        return total.contiguous()

    def _activated(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts._apply_gate(x) if self._has_gate else self.experts.act_fn(x)


class PackedGlu(PackedExperts):
    """Replaces a module with a child `mlp` whose `w1`, `v1` and `w2` are [experts · inner, hidden].

    An expert computes (activation(x w1ᵀ) * (x v1ᵀ)) w2.
    """

    def __init__(self, experts: nn.Module, team: Team, form: WeightFormat) -> None:
        """Moves the weights out of `experts`, whose activation is still used."""
        nn.Module.__init__(self)
        self.num_experts, self.experts, self._team = experts.num_experts, experts, team
        self._has_norm = False
        rows = (getattr(experts.mlp, name).chunk(self.num_experts) for name in GLU_WEIGHTS)
        w1, v1, w2 = rows
        self._first = [PackedMatrix(team, torch.cat(two), form) for two in zip(w1, v1, strict=True)]
        self._second = [PackedMatrix(team, matrix.T, form) for matrix in w2]
        for name in GLU_WEIGHTS:
            delattr(experts.mlp, name)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Returns the weighted sum of the experts' results, in the shape of `hidden_states`:
        [..., hidden].
        """
        x = hidden_states.flatten(end_dim=-2)
        return super().forward(x, top_k_index, top_k_weights).view_as(hidden_states)

    def _activated(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        activated: torch.Tensor = self.experts.mlp.activation_fn(gate) * up
        return activated


class PackedRuns(nn.Module):
    """Replaces a module that multiplies consecutive rows of one expert by this expert's matrix."""

    def __init__(self, experts: nn.Module, team: Team, form: WeightFormat) -> None:
        super().__init__()
        self._matrices = [PackedMatrix(team, matrix, form) for matrix in experts.weight]
        self._team = team

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of the weights and of their scales."""
        return sum(matrix.num_bytes for matrix in self._matrices)

    def forward(self, inputs: torch.Tensor, expert_size: Sequence[int]) -> torch.Tensor:
        """Multiplies [rows, inputs] and returns [rows, outputs]. `expert_size` is the number of
        rows of each expert.
        """
        return _products(self._matrices, inputs, _runs(accumulate(expert_size)), self._team)


def _runs(ends: Iterable[int]) -> list[Run]:
    """Returns the rows of each expert that has any. `ends` are the ends of all experts' rows."""
    rows = enumerate(pairwise([0, *ends]))
    return [(expert, start, end) for expert, (start, end) in rows if start < end]


def _products(
    matrices: Sequence[PackedMatrix], x: torch.Tensor, runs: Sequence[Run], team: Team
) -> torch.Tensor:
    """Multiplies each row of `x` by the matrix of the row's expert."""
    x = x.contiguous()
    computes_all = bool(runs) and runs[-1][2] == len(x)
    new = x.new_empty if computes_all else x.new_zeros
    y = new(x.shape[0], matrices[0].struct.rows)
    for expert, start, end in runs:
        matrices[expert].multiply(x[start:end], y[start:end], team)
    return y


def kind_of_experts(
    module: nn.Module,
) -> type[PackedExperts] | type[PackedGlu] | type[PackedRuns] | None:
    """Returns the class that replaces the module; None unless the module computes experts from
    unquantised weights.
    """
    if "forward" in vars(module):
        return None
    if holds_experts(module):
        return PackedExperts
    if not hasattr(module, "num_experts"):
        return None
    if all(_is_matrix(getattr(module, "mlp", None), name, 2) for name in GLU_WEIGHTS):
        return (
            PackedGlu if _takes(module, "hidden_states", "top_k_index", "top_k_weights") else None
        )
    is_runs = _is_matrix(module, "weight", 3) and _takes(module, "inputs", "expert_size")
    return PackedRuns if is_runs else None


def _is_matrix(module: object, name: str, ndim: int) -> bool:
    weights = getattr(module, name, None)
    is_plain = isinstance(weights, nn.Parameter) and weights.dtype in DTYPES
    return is_plain and weights.ndim == ndim


def _takes(module: nn.Module, *names: str) -> bool:
    return tuple(signature(module.forward).parameters) == names


def holds_experts(module: nn.Module) -> bool:
    """True if `module` computes experts from unquantised weights, in the form of most transformers
    models.
    """
    return (
        _is_matrix(module, "down_proj", 3)
        and all(hasattr(module, name) for name in ("is_transposed", "has_bias", "_apply_gate"))
        and "forward" not in vars(module)
    )


def router_layers(model: nn.Module) -> Iterator[nn.Linear]:
    """Returns the linear layers of routers. A router is a sibling of experts and has one output for
    each expert.
    """
    for block in model.modules():
        experts = (x for x in block.children() if kind_of_experts(x) is not None)
        sizes = {x.down_proj.shape[0] if holds_experts(x) else x.num_experts for x in experts}
        if sizes:
            linears = (x for x in block.modules() if isinstance(x, nn.Linear))
            yield from (x for x in linears if x.out_features in sizes)


def _take(experts: nn.Module, name: str, team: Team, form: WeightFormat) -> list[PackedMatrix]:
    """Removes the named parameter and its bias from the module. Returns both for each expert,
    packed.
    """
    matrices = []
    for weight in getattr(experts, name):
        matrix = weight.T if experts.is_transposed else weight
        matrices.append(PackedMatrix(team, matrix, form))
    delattr(experts, name)
    if experts.has_bias:
        for matrix, bias in zip(matrices, getattr(experts, f"{name}_bias"), strict=True):
            matrix.set_bias(bias)
        delattr(experts, f"{name}_bias")
    return matrices
