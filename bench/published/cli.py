"""`baton bench report`: checks or writes the figures of the documents."""

from pathlib import Path
from typing import Annotated

import typer

from bench.common.command import printed_errors
from bench.common.goals import Goals
from bench.lab.fluid.simulated import GOALS as SIMULATED_GOALS
from bench.lab.studies import STUDIES
from bench.published.document import fill_in, names_in
from bench.published.headline import HEADLINES
from bench.published.reports import RESULTS, ROOT, read_reports
from engine.errors import ConfigError

PAGES = (ROOT / "docs").glob("benchmarks/*.md")
# The comparison with Dynamo is finished: only its report and its goals are kept.
SIMULATOR_GOALS = Goals(
    {"sim/ttft_x1": 0.575, "sim/ttft_x2": 0.630, "sim/hit_ratio": 0.95, "sim/wall_s": 15.0},
    at_most=("sim/ttft_x1", "sim/ttft_x2", "sim/wall_s"),
)
GOALS = {
    **{kind.NAME: kind.GOALS for kind in STUDIES},
    "fluid_simulated": SIMULATED_GOALS,
    "simulator": SIMULATOR_GOALS,
}
DOCUMENTS = (*sorted(PAGES), ROOT / "docs/benchmarks.md", ROOT / "README.md")


def report(
    *,
    writes: Annotated[
        bool,
        typer.Option(
            "--write/--check", help="Write the figures, or fail if a document has others."
        ),
    ] = False,
) -> None:
    """Fill the pages of docs/benchmarks and README.md in from the reports in bench/results/."""
    with printed_errors():
        stale = stale_documents()
        for path, text in stale.items():
            if writes:
                path.write_text(text)
            typer.echo(f"{path.relative_to(ROOT)}: {'written' if writes else 'out of date'}")
        if stale and not writes:
            raise ConfigError("run: baton bench report --write")


def stale_documents() -> dict[Path, str]:
    """Each document whose figures differ from the reports, and what it should be.

    Raises ConfigError if a report cannot be published or no document shows it.
    """
    if not RESULTS.is_dir():
        raise ConfigError("documents are checked and written in a checkout: there is none here")
    reports = read_reports()
    texts = {path: path.read_text() for path in DOCUMENTS}
    hidden = sorted(reports.keys() - set().union(*map(names_in, texts.values())))
    if hidden:
        raise ConfigError(f"no page of docs/benchmarks has a block for: {', '.join(hidden)}")
    filled = {path: fill_in(text, reports, HEADLINES, GOALS) for path, text in texts.items()}
    return {path: text for path, text in filled.items() if text != texts[path]}
