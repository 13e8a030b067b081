"""`baton bench`: combines the commands of all benchmarks.

baton bench serve --url http://127.0.0.1:8000 --rate 4 --requests 200 --json serve.json
baton bench compare before.json after.json
baton bench engine --peer vllm=/path/to/its/python --json engine.json
baton bench quality --json quality.json
baton bench kv --peer mooncake=/path/to/its/python --json kv.json
baton bench store --json store.json
baton bench speculate --json speculate.json
baton bench router --json router.json
baton bench elastic --json elastic.json
baton bench elastic-live --json elastic-live.json
baton bench validation --json validation.json
baton bench gateway --peer fastapi=/path/to/its/python --json gateway.json
baton bench interference --json interference.json
baton bench fluid --json fluid.json
baton bench fluid --simulated --trace conversation_trace.jsonl --json fluid_simulated.json
baton bench chaos --seed 1 --json chaos.json
baton bench moves --json moves.json
baton bench hostile --json hostile.json
baton bench batches --kills 2 --json batches.json
baton bench report --write
"""

import typer

from bench.chaos.run import chaos
from bench.compare import compare
from bench.lab.experiment import command_of
from bench.lab.studies import STUDIES
from bench.processes.driven import END_SIGNALS
from bench.published import report
from bench.serve.cli import serve

app = typer.Typer(no_args_is_help=True, add_completion=False)
app.command()(serve)
app.command()(compare)
app.command()(chaos)
app.command()(report)

for kind in STUDIES:
    app.command(kind.NAME)(command_of(kind))


@app.callback()
def bench() -> None:
    """Measure a server, or a part of one."""
    END_SIGNALS.install()


if __name__ == "__main__":
    app()
