"""Keeps torch's own threads out of the way of the team that computes on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """A context in which torch computes with one thread, between jobs of the team.

    torch's threads would spin against the team's. If they divide a tensor, functions such as silu
    also compute the elements beside the cut with other last bits. Results would then depend on the
    number of tokens in a batch.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
