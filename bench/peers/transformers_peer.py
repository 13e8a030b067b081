"""transformers with `generate` and scaled dot product attention, in fp32. Driven by `driver.py`."""

import argparse
import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from driver import Prompts, Stopwatch  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList


class TokenStamps(StoppingCriteria):  # type: ignore[misc]
    """A stopping criterion that records the time after each token and never stops generation."""

    def __init__(self) -> None:
        self.watch = Stopwatch()
        self._is_first = True

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Records the time. Returns False for each sequence, [num_sequences], so generation
        continues.
        """
        if self._is_first:
            self.watch.stamp_first()
        else:
            self.watch.stamp_last()
        self._is_first = False
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Transformers:
    """One model, driven with `generate`."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.facts = {"version": transformers.__version__}
        torch.set_num_threads(options.threads)
        self._model = AutoModelForCausalLM.from_pretrained(
            options.checkpoint, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()

    def generate(self, prompts: Prompts, num_steps: int) -> dict[str, object]:
        """Answers the prompts. All must have the same length, so no prompt is padded."""
        ids = torch.tensor(prompts)
        stamps = TokenStamps()
        with torch.inference_mode():
            answers = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_steps + 1,
                min_new_tokens=num_steps + 1,
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([stamps]),
            )
        answer: dict[str, object] = stamps.watch.answer(answers[:, ids.shape[1] :].tolist())
        return answer


def load(options: argparse.Namespace) -> Transformers:
    """Loads the model and returns the engine."""
    if options.variant != "f32":
        raise ValueError(f"no variant {options.variant}")
    return Transformers(options)
