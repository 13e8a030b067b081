"""Trains the bundled draft: a smaller Llama that learns the target's distribution.

The draft starts with weights of the target: the embedding, the first layer and the last layer. Each
layer keeps all heads, and the more important half of its MLP. Of all pairs of layers, these two
approximate the target best. Removing heads would harm more than removing half of the MLP. At batch
1, a pass takes hardly longer than a pass of a model of half the width, which could not reuse the
target's weights.

The loss is KL(target || draft) over the windows of `on_policy`. The target's log-probabilities are
computed when the windows are scored, so a training step runs only the draft.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import LlamaForCausalLM

from engine.clock import Clock
from tools.bundled_model.muon import Optimisers
from tools.bundled_model.on_policy import Lessons

BATCH_TOKENS = 1024
MUON_LR, ADAM_LR = 0.01, 5e-4
CHECKPOINT_EVERY_S = 600.0
# lower bound of the share of all tokens beyond the likeliest; rounding to fp16 may make it negative
SMALLEST_SHARE = 1e-4


@dataclass(frozen=True, slots=True)
class Done:
    """The progress of the draft's training."""

    steps: int
    tokens: int
    loss: float  # the loss of the last step


@torch.no_grad()
def begin_as(draft: LlamaForCausalLM, target: LlamaForCausalLM, windows: torch.Tensor) -> None:
    """Copies the target's embedding, first layer and last layer, as far as they fit the draft.

    Both models have the same width and heads. The draft has two layers, whose MLPs keep the
    channels that add most to the target's residual stream on `windows` [num_windows, window] int64.
    """
    copy = {"model.embed_tokens.weight", "model.norm.weight"}
    state = {name: value for name, value in target.state_dict().items() if name in copy}
    weighed = _weigh_mlps(target, windows)
    for mine, theirs in enumerate((0, len(target.model.layers) - 1)):
        kept = weighed[theirs].topk(draft.config.intermediate_size).indices
        for name, value in target.model.layers[theirs].state_dict().items():
            if "gate_proj" in name or "up_proj" in name:
                value = value[kept]
            elif "down_proj" in name:
                value = value[:, kept]
            state[f"model.layers.{mine}.{name}"] = value
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    draft.load_state_dict(state)


def _weigh_mlps(target: LlamaForCausalLM, windows: torch.Tensor) -> list[torch.Tensor]:
    """Returns, for each layer, the RMS of what each channel [intermediate] of its MLP adds."""
    weighed: list[torch.Tensor] = []

    def weigh(down: torch.nn.Linear, inputs: tuple[torch.Tensor, ...]) -> None:
        channels = inputs[0].flatten(0, 1)
        weighed.append(channels.square().mean(0).sqrt() * down.weight.norm(dim=0))

    hooks = [layer.mlp.down_proj.register_forward_pre_hook(weigh) for layer in target.model.layers]
    target(windows, use_cache=False)
    for hook in hooks:
        hook.remove()
    return weighed


def distillation_loss(
    draft_logits: torch.Tensor,  # [num_tokens, vocab]
    top_ids: torch.Tensor,  # [num_tokens, top] int64
    top_logprobs: torch.Tensor,  # [num_tokens, top], log-probabilities of the target
) -> torch.Tensor:
    """Returns the mean KL(target || draft). All tokens beyond the target's likeliest count as
    one.
    """
    draft_logprobs = draft_logits.gather(-1, top_ids) - draft_logits.logsumexp(-1, keepdim=True)
    shares = top_logprobs.exp()
    rest = (1 - shares.sum(-1)).clamp_min(SMALLEST_SHARE)
    draft_rest = (1 - draft_logprobs.exp().sum(-1)).clamp_min(SMALLEST_SHARE)
    of_top = (shares * (top_logprobs - draft_logprobs)).sum(-1)
    return (of_top + rest * (rest.log() - draft_rest.log())).mean()


def distil(
    draft: LlamaForCausalLM,
    lessons: Sequence[Lessons],
    *,
    seconds: float,
    rng: random.Random,
    clock: Clock,
    checkpoint: Callable[[Done], None],
) -> Done:
    """Trains the draft for the given time, at least one step; calls `checkpoint` at intervals."""
    optimisers = Optimisers(draft, muon_lr=MUON_LR, adam_lr=ADAM_LR)
    begin_s = saved_s = clock.now_s()
    done = Done(0, 0, 0.0)
    while (share := (clock.now_s() - begin_s) / seconds) < 1 or not done.steps:
        draft.train()
        logits, *expected = _batch(draft, lessons, rng)
        loss = distillation_loss(logits, *expected)
        loss.backward()
        optimisers.step(min(share, 1.0))
        done = Done(done.steps + 1, done.tokens + len(logits), loss.item())
        if clock.now_s() - saved_s > CHECKPOINT_EVERY_S:
            checkpoint(done)
            saved_s = clock.now_s()
    return done


def _batch(
    draft: LlamaForCausalLM, lessons: Sequence[Lessons], rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns arguments of `distillation_loss` for windows of one length, drawn by share of
    tokens.
    """
    lesson = rng.choices(lessons, weights=[lesson.windows.numel() for lesson in lessons])[0]
    num_rows = min(max(1, BATCH_TOKENS // lesson.window), len(lesson.windows))
    rows = rng.sample(range(len(lesson.windows)), num_rows)
    logits = draft(lesson.windows[rows].long(), use_cache=False).logits
    top_ids, top_logprobs = lesson.top_ids[rows].long(), lesson.top_logprobs[rows].float()
    return logits.flatten(0, 1), top_ids.flatten(0, 1), top_logprobs.flatten(0, 1)
