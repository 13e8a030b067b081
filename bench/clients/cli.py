"""`baton bench clients`: its options, and the table that it prints."""

from dataclasses import asdict
from typing import Annotated

import typer

from bench.clients.harnesses import PEERS, our_harness, peer_harness
from bench.clients.plan import ClientsPlan
from bench.clients.results import disagreements, results_of_clients
from bench.clients.run import measure, version_of
from bench.common.command import (
    JsonOption,
    RepeatOption,
    peer_option,
    printed_errors,
    publish,
)
from bench.common.machine import report_here
from bench.common.options import peers_named
from bench.common.progress import say_on_stderr
from bench.common.report import notes_on


def clients(
    *,
    peer: Annotated[list[str] | None, peer_option(*PEERS)] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests of each load.")] = 300,
    repeat: RepeatOption = 1,
    json: JsonOption = None,
) -> None:
    """Check `bench serve` against a server of known latencies, and beside guidellm and aiperf."""
    with printed_errors():
        peers = peers_named(peer or [], PEERS)
        versions = {one.name: version_of(one) for one in peers}
        plan = ClientsPlan(num_requests=requests)
        harnesses = [our_harness(plan), *(peer_harness(plan, one) for one in peers)]
        results = results_of_clients(plan, measure(plan, harnesses, repeat, say_on_stderr()))
        config = {**asdict(plan), **notes_on(versions)}
        report = report_here("clients", seed=0, config=config, results=results)
        title = f"{requests} requests to a server of known latencies, by each harness"
        publish(report, json, title=title, warnings=disagreements(results))
