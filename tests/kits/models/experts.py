"""Modules of experts in transformers' layout, and input tokens for them."""

from types import SimpleNamespace

import torch
from torch import nn
from transformers.integrations.moe import use_experts_implementation

NUM_EXPERTS, TOP_K = 5, 3
HIDDEN, INNER = 20, 24
EXPERTS = {
    "gated": {},
    "transposed": {"is_transposed": True},
    "biased": {"has_bias": True, "is_transposed": True},
    "without a gate": {"has_gate": False},
    "biased without a gate": {"has_gate": False, "has_bias": True},
    "normed": {"has_post_expert_norm": True},
}


def experts_of(*, hidden=HIDDEN, inner=INNER, **flags):
    """Returns a module of experts with transformers' layout and computation."""

    @use_experts_implementation(**flags)
    class Experts(nn.Module):
        def __init__(self, _config):
            super().__init__()
            gated = flags.get("has_gate", True)
            shapes = {
                "gate_up_proj" if gated else "up_proj": (inner * (2 if gated else 1), hidden),
                "down_proj": (hidden, inner),
            }
            for name, (outputs, inputs) in shapes.items():
                shape = (inputs, outputs) if flags.get("is_transposed") else (outputs, inputs)
                setattr(self, name, parameter(NUM_EXPERTS, *shape))
                if flags.get("has_bias"):
                    setattr(self, f"{name}_bias", parameter(NUM_EXPERTS, outputs))
            self.num_experts = NUM_EXPERTS
            self.act_fn = nn.SiLU()
            self.post_expert_norm = nn.RMSNorm(hidden)

        def forward(self, *_):
            raise AssertionError("transformers puts an implementation of its own here")

    torch.manual_seed(0)
    experts = Experts(SimpleNamespace(_experts_implementation="batched_mm"))
    return experts.requires_grad_(requires_grad=False)


def parameter(*shape):
    return nn.Parameter(0.3 * torch.randn(shape), requires_grad=False)


def tokens(num_tokens, hidden=HIDDEN):
    """Returns hidden states, and for each token different experts and their weights."""
    torch.manual_seed(num_tokens)
    scores = torch.randn(num_tokens, NUM_EXPERTS).softmax(-1)
    shares, chosen = scores.topk(TOP_K, dim=-1)
    return torch.randn(num_tokens, hidden), chosen, shares
