"""Block tables and logits of sequences that a test computes step by step."""

import random
from multiprocessing import shared_memory

import torch

from engine.model.cuda import CudaForward
from engine.worker.batch import Row
from tests.kits.gpu.cuda_forward import attend_but_pads


def scattered(count, *, num_blocks, seed=0):
    """Returns block tables of `num` sequences, in random order over the whole pool."""
    blocks = random.Random(seed).sample(range(num_blocks), num_blocks)
    share = num_blocks // count
    return [blocks[i * share : (i + 1) * share] for i in range(count)]


def logits_in_chunks(runner, token_ids, chunks, table, company=(), first=None):
    """Returns logits [len(token_ids), vocab], computed in chunks beside other rows in each step.

    In step i, the first `first(i)` other rows precede the sequence's own row; by default all do.
    """
    found, start = [], 0
    for i, chunk in enumerate(chunks):
        row = Row("a", token_ids[start : start + chunk], start, table, None)
        num_before = len(company) if first is None else first(i)
        before, after = company[:num_before], company[num_before:]
        place = sum(len(other.token_ids) for other in before)
        with torch.inference_mode():
            rows = [*before, row, *after]
            found.append(runner._forward.logits(rows, range(place, place + chunk)))
        start += chunk
    return torch.cat(found)


def as_on_a_gpu(captured_rows):
    """Stands in for `engine.model.runner._forward`: runs the GPU code on a CPU."""

    def forward(loaded, weights, beside=None):
        return CudaForward(
            loaded, weights, attend=attend_but_pads, captured_rows=captured_rows, compiler=None
        )

    return forward


class SharedBuffer:
    """Shared memory in which a runner allocates its KV."""

    def __call__(self, num_bytes):
        self._memory = shared_memory.SharedMemory(create=True, size=num_bytes)
        return self._memory.buf

    def read(self, start, num_bytes):
        return bytes(self._memory.buf[start : start + num_bytes])

    def close(self):
        """Frees the memory. Raises BufferError if any object still points into it."""
        self._memory.close()
        self._memory.unlink()
