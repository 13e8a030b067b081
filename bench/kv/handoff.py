"""Measures what a handoff costs a request, on `baton serve` as a user runs it.

There are one prefill worker and one decode worker, each with one thread. Prompts arrive one at a
time, so the figures are those of the path and not of a queue. Prompts have the same length and
different beginnings, so every block is computed and moved. Figures are from gateway timelines.
"""

import uvloop

from bench.common.shapes import cached_checkpoint
from bench.kv.plan import HandoffPlan
from bench.kv.results import Handoffs
from bench.processes.serving import Options, serving
from bench.serve.lengths import fixed
from bench.serve.plan import ServeAsk, ServeLoad, ServePlan, ServeTarget
from bench.serve.run import measure as measure_server

REQUEST_TIMEOUT_S = 60.0
OUTPUT_LEN = 4  # the second token ends the handoff
KV_MIB = 512


def measure(plan: HandoffPlan, transport: str, *, seed: int) -> Handoffs:
    """Timelines of all requests over one transport. Raises BatonError if there are none."""
    checkpoint = cached_checkpoint(plan.shape, seed)
    options: Options = {
        "--prefill": 1,
        "--decode": 1,
        "--threads": 1,
        "--kv-mib": KV_MIB,
        "--kv-transport": transport,
    }
    with serving(checkpoint, options) as server:
        asked = ServePlan(
            target=ServeTarget(server.url, timeout_s=REQUEST_TIMEOUT_S),
            load=ServeLoad(
                rate_per_s=float("inf"),
                num_requests=plan.num_requests,
                concurrency_limit=1,
                num_warmup=1,
                num_repeats=plan.num_repeats,
            ),
            ask=ServeAsk(fixed(plan.prompt_len), fixed(OUTPUT_LEN), tokenizer_dir=checkpoint),
            seed=seed,
        )
        runs = uvloop.run(measure_server(asked)).runs
    return Handoffs(
        transport=transport,
        repetitions=tuple(
            tuple(answer.timeline_s for answer in run.answers) for run in runs if run.answers
        ),
        num_failed=sum(len(run.failures) for run in runs),
    )
