"""Measures clients whose histories grow turn by turn and do not all fit the workers.

The same load is sent to a deployment without a store and to one with a store. It is a closed loop:
it says what a fixed number of clients get, not what a server can take.
"""

from dataclasses import dataclass

import uvloop

from bench.client.load import LoadRun
from bench.common.progress import Say, say_nothing
from bench.common.shapes import cached_checkpoint
from bench.lab.store.clients import served_with_store
from bench.lab.store.plan import SERVED, STORE_MIB, TURNS, StorePlan
from bench.serve.lengths import fixed
from bench.serve.plan import ServeAsk, ServeLoad, ServePlan, ServeTarget
from bench.serve.run import ServeMeasured
from bench.serve.run import measure as measure_server
from bench.serve.sessions import TalkShape

REQUEST_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class TurnsMeasured:
    """The same load without and with a store."""

    without: LoadRun
    with_store: LoadRun


def measure(plan: StorePlan, say: Say = say_nothing) -> TurnsMeasured:
    """Carries it out. Raises BatonError."""
    runs = []
    for store_mib in (0, STORE_MIB):
        say(f"{TURNS.clients} clients {'with' if store_mib else 'without'} a store")
        runs.append(_measured(plan, store_mib))
    return TurnsMeasured(*runs)


def _measured(plan: StorePlan, store_mib: int) -> LoadRun:
    checkpoint = cached_checkpoint(plan.shape, plan.seed)
    options = {**SERVED, "--kv-mib": TURNS.worker_mib}
    with served_with_store(checkpoint, options, store_mib=store_mib) as served:
        asked = ServePlan(
            target=ServeTarget(served.url, timeout_s=REQUEST_TIMEOUT_S),
            load=ServeLoad(
                rate_per_s=float("inf"),
                num_requests=TURNS.num_requests,
                clients=TURNS.clients,
                num_warmup=1,
            ),
            ask=ServeAsk(fixed(TURNS.input_len), fixed(TURNS.output_len), tokenizer_dir=checkpoint),
            talk=TalkShape(turns=fixed(TURNS.turns)),
            seed=plan.seed,
        )
        measured: ServeMeasured = uvloop.run(measure_server(asked))
    return measured.runs[0]
