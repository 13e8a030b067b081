"""The optimisers of the bundled models, and the schedule of their learning rate.

Muon (Jordan et al., 2024) trains the hidden matrices, AdamW the other weights. The schedule depends
on the elapsed share of the run's time, not on steps. So a run ends on time on any machine.
"""

import torch
from transformers import LlamaForCausalLM

WARM_UP_TO, DECAY_FROM = 0.01, 0.65  # warm-up ends and decay starts at these shares of a run's time


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised by five Newton-Schulz steps.

    torch.optim.Muon does the same in bfloat16, which CPUs without AVX-512 BF16 multiply fifteen
    times slower than float32. This class computes in float32.
    """

    def __init__(self, params: list[torch.nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.95, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self) -> None:
        """Updates every matrix that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                m = state.setdefault("momentum", torch.zeros_like(p))
                m.lerp_(p.grad, 1 - group["momentum"])
                update = _orthogonalise(p.grad.lerp(m, group["momentum"]))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)


def _orthogonalise(g: torch.Tensor) -> torch.Tensor:
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if g.shape[0] > g.shape[1] else x


class Optimisers:
    """Muon for the layers' matrices, AdamW for embeddings and norms."""

    def __init__(self, model: LlamaForCausalLM, *, muon_lr: float, adam_lr: float) -> None:
        hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and "layers" in n]
        rest = [p for n, p in model.named_parameters() if not (p.ndim == 2 and "layers" in n)]
        adam = torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self._peaks = ((Muon(hidden, lr=muon_lr), muon_lr), (adam, adam_lr))

    def step(self, share: float) -> None:
        """Does one update after `share` of the run's time, and clears the gradients."""
        for optimiser, peak in self._peaks:
            for group in optimiser.param_groups:
                group["lr"] = peak * schedule(share)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)


def schedule(share: float) -> float:
    """Returns the learning rate after `share` of the run, as a fraction of its peak.

    The rate warms up, stays constant, and decays linearly.
    """
    if share < WARM_UP_TO:
        return max(share / WARM_UP_TO, 0.01)
    if share < DECAY_FROM:
        return 1.0
    return max((1 - share) / (1 - DECAY_FROM), 0.0)
