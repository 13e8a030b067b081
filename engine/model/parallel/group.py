"""The ranks of one worker, and the collective operations between them.

torch.distributed implements the operations: NCCL on GPUs, gloo on CPUs. The ranks find each other
through a file that only their user can read, so they need no open port. gloo and NCCL themselves
listen on the loopback interface, whatever the environment says, because all ranks are on one
machine. Every operation has a deadline. If a rank exits, the operations of the other ranks fail.
"""

import os
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from engine.worker.ranks import RankPlace

TIMEOUT_S = 60.0  # longest duration of one operation, with the wait for the other ranks
# Reading their parts from a disk may take ranks much longer, and some ranks longer than others. The
# whole start has another deadline elsewhere.
LOAD_TIMEOUT_S = 4 * 3600.0
INTERFACE_OF = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class RankGroup:
    """One rank's access to the group of all ranks. All ranks must call the same methods in the same
    order.
    """

    def __init__(
        self,
        place: RankPlace,
        rendezvous: Path,
        *,
        is_cuda: bool = False,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`rendezvous` is the path of a file that is empty or missing, and that only this user can
        read.
        """
        self.place = place
        self._rendezvous = rendezvous
        self._is_cuda = is_cuda
        self._timeout = timedelta(seconds=timeout_s)

    def open(self) -> None:
        """Waits for all ranks. Raises RuntimeError if a rank does not join."""
        place = self.place
        os.environ |= dict.fromkeys(INTERFACE_OF, "lo")
        store = dist.FileStore(str(self._rendezvous), place.size)
        store.set_timeout(self._timeout)
        dist.init_process_group(
            "nccl" if self._is_cuda else "gloo",
            store=store,
            rank=place.rank,
            world_size=place.size,
            timeout=self._timeout,
        )
        # The default of torch is half an hour.
        new_group = partial(dist.new_group, timeout=self._timeout)
        groups = [new_group(list(place.ranks_of(stage))) for stage in range(place.pp)]
        self._stage = groups[place.stage]
        # Facts of the host, such as sizes, are exchanged without a GPU.
        self._host = new_group(backend="gloo") if self._is_cuda else dist.group.WORLD

    def close(self) -> None:
        """Leaves the group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    # ------------------------------------------------------------ within a stage

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Adds up `x` over the slices, in place."""
        dist.all_reduce(x, group=self._stage)
        return x

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """Joins the `x` [..., n] of all slices side by side. Returns [..., tp * n]."""
        parts = [torch.empty_like(x) for _ in range(self.place.tp)]
        dist.all_gather(parts, x.contiguous(), group=self._stage)
        return torch.cat(parts, dim=-1)

    # ------------------------------------------------------------ between stages

    def send(self, x: torch.Tensor) -> None:
        """Sends `x` to the rank with the same slice in the next stage."""
        dist.send(x.contiguous(), self.place.rank - self.place.tp)

    def receive(self, like: torch.Tensor) -> torch.Tensor:
        """Receives a tensor with the shape and type of `like` from the previous stage."""
        x = torch.empty_like(like)
        dist.recv(x, self.place.rank + self.place.tp)
        return x

    # ------------------------------------------------------------ all ranks

    def await_loading(self) -> None:
        """Waits until all ranks have read their parts. Raises RuntimeError if a rank has exited."""
        dist.monitored_barrier(self._host, timedelta(seconds=LOAD_TIMEOUT_S))

    def total(self, number: float) -> float:
        """Returns the sum of this number over all ranks."""
        x = torch.tensor(number, dtype=torch.float64)
        dist.all_reduce(x, group=self._host)
        return float(x)

    def least(self, number: int) -> int:
        """Returns the smallest value of this number over all ranks."""
        x = torch.tensor(number)
        dist.all_reduce(x, op=dist.ReduceOp.MIN, group=self._host)
        return int(x)
