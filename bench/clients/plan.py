"""The loads that every load harness sends, and our own command line for them. Pure.

Both loads are the same for every harness: in `closed`, clients that send as soon as their answer
has ended; in `open`, requests at even gaps. Random gaps would differ between harnesses.
"""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

EVEN = 1e6  # gamma shape of gaps that are nearly equal


class ClientLoop(StrEnum):
    """The two loads."""

    CLOSED = "closed"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class ClientsPlan:
    """Latencies of the server, and the loads."""

    ttft_ms: float = 50.0
    itl_ms: float = 10.0
    num_requests: int = 300
    num_clients: int = 4
    rate_per_s: float = 10.0
    input_len: int = 32
    output_len: int = 32

    @property
    def e2e_ms(self) -> float:
        """Time from a request to its last token, if nothing is late."""
        return self.ttft_ms + (self.output_len - 1) * self.itl_ms


def our_command(
    plan: ClientsPlan, loop: ClientLoop, *, url: str, python: str, path: Path
) -> list[str]:
    """The command of `baton bench serve`, with its report at `path`."""
    shape = (
        ["--clients", str(plan.num_clients)]
        if loop is ClientLoop.CLOSED
        else ["--rate", str(plan.rate_per_s), "--burstiness", str(EVEN)]
    )
    lens = ["--input-len", str(plan.input_len), "--output-len", str(plan.output_len)]
    return [
        *(python, "-m", "bench.cli", "serve", "--url", url, *shape, *lens),
        *("--requests", str(plan.num_requests), "--warmup", "0", "--json", str(path)),
    ]
