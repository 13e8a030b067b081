"""Copies from the host to a device for which the host does not wait."""

import numpy as np
import torch


def brought(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copies an array to `device`: to a GPU from pinned memory, which torch frees after the copy.

    From other memory a copy would first wait for all that the GPU still has to do.
    """
    memory = held(array, pinned=device.type == "cuda")
    return memory.to(device, non_blocking=True)


def held(array: np.ndarray, *, pinned: bool) -> torch.Tensor:
    """A copy of an array in host memory."""
    memory = torch.empty(array.shape, dtype=getattr(torch, array.dtype.name), pin_memory=pinned)
    memory.numpy()[...] = array
    return memory
