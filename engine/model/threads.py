"""Keeps torch's threads from competing with the kernels' team of threads on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Returns a context in which torch computes with one thread, between jobs of the team.

    torch's threads would spin against the team's. And where threads cut a tensor, functions such as
    silu give the elements beside the cut other last bits. Results would then depend on the number
    of tokens in a batch.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
