"""The load harnesses: how each is started, and where its figures are. Pure, but for its reports."""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.clients import aiperf, guidellm
from bench.clients.plan import ClientLoop, ClientsPlan, our_command
from bench.clients.results import OURS, Told, told_by_us
from bench.common.options import PeerProgram, environment_of_peers
from bench.common.report import from_json

TOKENIZER = Path(__file__).parents[2] / "engine" / "model" / "bundled" / "target"
PEERS = (guidellm.NAME, aiperf.NAME)


@dataclass(frozen=True, slots=True)
class LoadHarness:
    """One harness: `command` puts its report into a folder, and `told` reads it there."""

    name: str
    command: Callable[[ClientLoop, str, Path], list[str]]  # load, URL of the server, folder
    told: Callable[[Path], Told]
    environment: Mapping[str, str]


def our_harness(plan: ClientsPlan) -> LoadHarness:
    """`baton bench serve`."""
    return LoadHarness(
        OURS,
        lambda loop, url, folder: our_command(
            plan, loop, url=url, python=sys.executable, path=folder / "serve.json"
        ),
        lambda folder: told_by_us(from_json((folder / "serve.json").read_bytes())),
        dict(os.environ),
    )


def peer_harness(plan: ClientsPlan, peer: PeerProgram) -> LoadHarness:
    """A peer, whose program lies beside its Python."""
    program, environment = peer.python.parent / peer.name, environment_of_peers()
    if peer.name == guidellm.NAME:
        return LoadHarness(
            peer.name,
            lambda loop, url, folder: guidellm.guidellm_command(
                plan, loop, url=url, program=program, folder=folder, tokenizer=TOKENIZER
            ),
            lambda folder: guidellm.told_by_guidellm((folder / guidellm.REPORT).read_bytes()),
            {**environment, "HF_HUB_OFFLINE": "1"},
        )
    return LoadHarness(  # aiperf takes no folder of a tokenizer when it is told to be offline
        peer.name,
        lambda loop, url, folder: aiperf.aiperf_command(
            plan, loop, url=url, program=program, folder=folder, tokenizer=TOKENIZER
        ),
        lambda folder: aiperf.told_by_aiperf((folder / aiperf.REPORT).read_bytes()),
        environment,
    )
