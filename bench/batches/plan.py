"""The plan of one `bench batches`. Pure.

Two parts, each with a deployment of its own that keeps its batches in a file:

    beside    windows of clients' requests, in turn with and without a batch. A window with a batch
              begins with a file of its share of the requests. After it the batch is waited for.
    killed    all requests as one file, undisturbed and then again. The second time every process is
              killed with SIGKILL, as often as asked, and the deployment is started again.

Clients send at random times, as a Poisson process. A pair of windows has the same times and other
prompts. Prompts of batches are short and their answers a few tokens long, so that ten thousand take
minutes on a laptop. Each line has its own seed, so both files of the second part have the same
answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from bench.client.arrivals import arrival_times_s
from bench.common.prompts import PromptShape, text_prompts
from bench.common.report import Scalar

ENDPOINT = "/v1/completions"
WITH, WITHOUT = "with", "without"


@dataclass(frozen=True, slots=True)
class BesidePlan:
    """Everything that is run."""

    num_requests: int = 10_000  # of batches, in each part
    num_pairs: int = 10  # of windows
    window_s: float = 20.0
    rate_per_s: float = 4.0  # of clients
    input_len: int = 48  # words of a client's prompt
    output_len: int = 16
    batch_input_len: int = 6
    batch_output_len: int = 4
    num_kills: int = 0  # 0: the second part is left out
    seed: int = 0

    @property
    def num_of_window(self) -> int:
        """Requests of the batch of one window."""
        return -(-self.num_requests // self.num_pairs)


def quick(plan: BesidePlan) -> BesidePlan:
    """A smaller plan, which takes under a minute."""
    return replace(
        plan, num_requests=200, num_pairs=1, window_s=4.0, num_kills=plan.num_kills and 1
    )


def order_of(plan: BesidePlan, pair: int) -> tuple[str, str]:
    """The windows of a pair, in their order, which changes with each pair."""
    return (WITH, WITHOUT) if (pair + plan.seed) % 2 else (WITHOUT, WITH)


def due_times_s(plan: BesidePlan, pair: int) -> list[float]:
    """When clients send, in seconds from the start of a window."""
    number = max(round(plan.rate_per_s * plan.window_s), 1)
    return arrival_times_s(
        plan.rate_per_s, number, burstiness=1.0, rng=Random(f"{plan.seed}/{pair}/arrivals")
    )


def client_prompts(plan: BesidePlan, pair: int, which: str, number: int) -> Sequence[Any]:
    """The prompts of clients in one window; no two are equal."""
    rng = Random(f"{plan.seed}/{pair}/{which}")
    return text_prompts(PromptShape(number, plan.input_len, 0), rng)


def lines_of(plan: BesidePlan, name: str, number: int, model: str) -> list[dict[str, Any]]:
    """The lines of one input file."""
    rng = Random(f"{plan.seed}/{name}")
    prompts = text_prompts(PromptShape(number, plan.batch_input_len, 0), rng)
    return [
        {
            "custom_id": f"{name}-{index}",
            "method": "POST",
            "url": ENDPOINT,
            "body": {
                "model": model,
                "prompt": prompt,
                "max_tokens": plan.batch_output_len,
                "temperature": 1.0,
                "seed": index,
                "ignore_eos": True,
            },
        }
        for index, prompt in enumerate(prompts)
    ]


def config_of(plan: BesidePlan) -> dict[str, Scalar]:
    """The plan as a flat mapping for the report."""
    return {name: getattr(plan, name) for name in plan.__dataclass_fields__ if name != "seed"}
