"""Asynchronous copies from the host to a device."""

import numpy as np
import torch


def brought(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copies an array to `device`: to a GPU from pinned memory, which torch frees after the copy.

    A copy from unpinned memory would first wait for all work that is queued on the GPU.
    """
    memory = held(array, pinned=device.type == "cuda")
    return memory.to(device, non_blocking=True)


def held(array: np.ndarray, *, pinned: bool) -> torch.Tensor:
    """Returns a copy of an array in host memory."""
    memory = torch.empty(array.shape, dtype=getattr(torch, array.dtype.name), pin_memory=pinned)
    memory.numpy()[...] = array
    return memory
