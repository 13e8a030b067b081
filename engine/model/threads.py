"""Torch's own threads, which stand in the way of the team that computes on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Meanwhile torch computes by itself, between jobs of the team.

    Its threads would spin against the team's; and where they part a tensor, functions such as silu
    compute the elements beside the cut with other last bits, so that results would depend on how
    many tokens a batch has.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
