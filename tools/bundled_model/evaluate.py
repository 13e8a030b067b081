"""Quality of the bundled pair: perplexity, and how often the draft agrees with the target.

Agreement is the share of positions where both models choose the same token after the same text.
Verification keeps the same share of first drafted tokens. When sampling, both models use the same
noise, as in Baton's decoder. The models compute in fp32; int8 lowers the quality a little.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from engine.model.sampling.choosing import gumbel_noise
from tools.bundled_model.on_policy import Written

WINDOW = 1024
TEMPERATURES = (0.0, 0.7, 1.0)


@torch.no_grad()
def evaluate(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    held_out: torch.Tensor,
    written: Sequence[Written],
    max_windows: int,
) -> dict[str, float]:
    """Returns quality figures on text that no model was trained on.

    `held_out` [num_tokens] is text written by people. In `written`, the target answers prompts cut
    from that text, at one temperature each. An answer counts up to its first end of text or end of
    turn.
    """
    target.eval(), draft.eval()
    figures = _on_held_out(target, draft, held_out, max_windows)
    for text in written:
        name = f"generated_{_name(text.samplings[0].temperature)}"
        figures[name] = _on_generated(draft, text, ends=target.config.eos_token_id)
    return figures


def _on_held_out(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, held_out: torch.Tensor, max_windows: int
) -> dict[str, float]:
    num = min(max_windows, (len(held_out) - 1) // WINDOW)
    loss = draft_loss = 0.0
    same = dict.fromkeys(TEMPERATURES, 0)
    for i in range(num):
        text = held_out[i * WINDOW : (i + 1) * WINDOW + 1]
        logits, draft_logits = (m(text[None, :-1]).logits[0] for m in (target, draft))
        loss += F.cross_entropy(logits, text[1:]).item() / num
        draft_loss += F.cross_entropy(draft_logits, text[1:]).item() / num
        noise = _noise(logits, seed=i, start=1)
        for t in TEMPERATURES:
            same[t] += int((_choose(logits, t, noise) == _choose(draft_logits, t, noise)).sum())
    return {
        "held_out_tokens": float(num * WINDOW),
        "perplexity": math.exp(loss),
        "draft_perplexity": math.exp(draft_loss),
        **{_name(t): count / (num * WINDOW) for t, count in same.items()},
    }


def _on_generated(draft: LlamaForCausalLM, text: Written, ends: Sequence[int]) -> float:
    """Returns the share of the target's own tokens that the draft would have proposed."""
    same = total = 0
    for window, start, sampling in zip(text.windows, text.prompt_lens, text.samplings, strict=True):
        answer = window[start:]
        stops = torch.isin(answer, torch.tensor(ends)).nonzero()[:, 0].tolist()
        answer = answer[: stops[0] + 1 if stops else None]
        logits = draft(window[None, : start + len(answer) - 1]).logits[0, start - 1 :]
        noise = _noise(logits, seed=sampling.seed, start=start)
        same += int((_choose(logits, sampling.temperature, noise) == answer).sum())
        total += len(answer)
    return same / total


def _noise(logits: torch.Tensor, *, seed: int, start: int) -> torch.Tensor:
    """Returns the decoder's noise [num_tokens, vocab] for positions from `start` on."""
    num, vocab = logits.shape
    return gumbel_noise(torch.full((num,), seed), torch.arange(start, start + num), range(vocab))


def _choose(logits: torch.Tensor, temperature: float, noise: torch.Tensor) -> torch.Tensor:
    """Returns the chosen tokens [num_tokens]."""
    return (logits if temperature == 0 else logits / temperature + noise).argmax(-1)


def _name(temperature: float) -> str:
    return f"agreement_{temperature:.1f}".replace(".", "_")
