"""Mixtures of experts over packed weights.

transformers holds the experts of a layer in one module, as parameters [num_experts, outputs,
inputs] (transposed in some models). It calls the module with tokens, the experts chosen for each,
and their shares. The computation is replaceable (its `ExpertsInterface`). `holds_experts` checks
for the attributes that `PackedExperts` uses. The whole module is replaced, as with linear layers:
an implementation is chosen by name for all modules of a config, but those of a quantised checkpoint
have to keep theirs.

Pairs of a token and one of its experts are computed expert by expert. Each token's results are
added up in the order in which its router names them, so nothing depends on the other tokens.

Routers decide, so they are never quantised. Most multiply by a bare parameter, with `F.linear`,
amid code of their own: see `native.invariant`.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import nn

from engine.config import WeightFormat
from engine.model.native.matrix import PackedMatrix, Team

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


class PackedExperts(nn.Module):
    """Replaces a module that `holds_experts`, for fp32 activations on a CPU."""

    def __init__(self, experts: nn.Module, team: Team, form: WeightFormat) -> None:
        """Takes the weights out of `experts`, whose activation and gating it goes on using."""
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
        """Memory of the weights and their scales."""
        return sum(matrix.num_bytes for matrix in (*self._first, *self._second))

    def forward(
        self,
        hidden_states: torch.Tensor,  # [num_tokens, hidden]
        top_k_index: torch.Tensor,  # [num_tokens, top_k]: the experts of each token
        top_k_weights: torch.Tensor,  # [num_tokens, top_k]: their shares
    ) -> torch.Tensor:
        """Sums of the experts' results, [num_tokens, hidden].

        The expert behind the last gives zeros.
        """
        num_tokens, top_k = top_k_index.shape
        chosen = top_k_index.reshape(-1)
        order = chosen.argsort(stable=True)  # of pairs: expert by expert
        ends = chosen.bincount(minlength=self.num_experts).cumsum(0).tolist()
        runs = [(e, *run) for e, run in enumerate(pairwise([0, *ends])) if run[0] < run[1]]
        if len(runs) and runs[-1][0] == self.num_experts:
            del runs[-1]  # these tokens' experts are elsewhere
        x = hidden_states.index_select(0, order // top_k)
        x = self._activated(self._products(self._first, x, runs))
        x = self._products(self._second, x, runs)
        if self._has_norm:
            x = self.experts.post_expert_norm(x)
        results = torch.empty_like(x).index_copy_(0, order, x).view(num_tokens, top_k, -1)
        results *= top_k_weights[..., None]
        total = results[:, 0]
        for slot in range(1, top_k):
            total += results[:, slot]
        return total.contiguous()

    def _products(
        self, matrices: list[PackedMatrix], x: torch.Tensor, runs: list[tuple[int, int, int]]
    ) -> torch.Tensor:
        """Rows of `x`, each times the matrix of its run: (expert, first row, end)."""
        x = x.contiguous()
        computes_all = bool(runs) and runs[-1][2] == len(x)
        new = x.new_empty if computes_all else x.new_zeros
        y = new(x.shape[0], matrices[0].struct.rows)
        for expert, start, end in runs:
            matrices[expert].multiply(x[start:end], y[start:end], self._team)
        return y

    def _activated(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts._apply_gate(x) if self._has_gate else self.experts.act_fn(x)


def holds_experts(module: nn.Module) -> bool:
    """True if `module` computes experts as described above, from plain weights."""
    weights = getattr(module, "down_proj", None)
    return (
        isinstance(weights, nn.Parameter)
        and weights.ndim == 3
        and weights.dtype in DTYPES
        and all(hasattr(module, name) for name in ("is_transposed", "has_bias", "_apply_gate"))
        and "forward" not in vars(module)
    )


def router_layers(model: nn.Module) -> Iterator[nn.Linear]:
    """Linear layers of routers: beside experts, with one output for each."""
    for block in model.modules():
        sizes = {x.down_proj.shape[0] for x in block.children() if holds_experts(x)}
        if sizes:
            linears = (x for x in block.modules() if isinstance(x, nn.Linear))
            yield from (x for x in linears if x.out_features in sizes)


def _take(experts: nn.Module, name: str, team: Team, form: WeightFormat) -> list[PackedMatrix]:
    """The parameter of that name, and its bias, packed for each expert and removed from
    the module.
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
