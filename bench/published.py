"""`baton bench report`: checks or writes the figures in documents, from `bench/results/NAME.json`.

A block of figures is the text between a marker and the next `<!-- end -->`. Markers:

    <!-- report: NAME -->            all results of bench/results/NAME.json, with date and machine
    <!-- report: NAME a/* b/c -->    only the results whose names match a pattern
    <!-- headline -->                the rows of `HEADLINES`

All other text of a document is written by hand and stays as it is.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from bench.common.command import printed_errors
from bench.common.report import NO_GOALS, Goals, Report, Result, from_json, to_json
from bench.common.tables import columns_of, number_text
from bench.lab.fluid.simulated import GOALS as SIMULATED_GOALS
from bench.lab.studies import STUDIES
from engine.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]  # root folder of the repository
RESULTS = ROOT / "bench" / "results"


def read_reports(folder: Path = RESULTS) -> Mapping[str, Report]:
    """Reads every report in the folder. Returns the reports by file name without `.json`, in
    alphabetical order.

    Raises ConfigError if a file is not a report that can be published.
    """
    return {path.stem: read_report(path) for path in sorted(folder.glob("*.json"))}


def read_report(path: Path) -> Report:
    """Reads one report. Raises ConfigError if it cannot be published (see `fault_of`)."""
    data = path.read_bytes()
    try:
        report = from_json(data)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path.name}: {error}") from error
    is_whole = msgspec.json.decode(data) == msgspec.json.decode(to_json(report))
    fault = fault_of(report) if is_whole else "it has fields that no report has"
    if fault is not None:
        raise ConfigError(f"{path.name}: {fault}")
    return report


def fault_of(report: Report) -> str | None:
    """Returns the reason why a report cannot be published, or None if it can.

    The figures must belong to a commit, so that a reader can check it out and measure again.
    """
    names = [result.name for result in report.results]
    if not names:
        return "it has no results"
    if len(set(names)) < len(names):
        return "two results have the same name"
    if report.commit is None or report.commit.endswith("-dirty"):
        return f"it was not measured at a commit, but at {report.commit}"
    try:
        datetime.fromisoformat(report.date)
    except ValueError:
        return f"{report.date!r} is not a date"
    return None


@dataclass(frozen=True, slots=True)
class Headline:
    """One row of the headline table. The result is compared with `peer`, or without a peer with its
    limit, if it has one.
    """

    label: str
    report: str  # name of the report's file, without .json
    result: str
    peer: str | None = None


HEADLINES: tuple[Headline, ...] = (
    Headline("prefill, fp32 weights, 88 M model", "engine", "prefill/fp32", "vllm"),
    Headline("decode of 32 sequences, fp32 weights", "engine", "decode_b32/fp32", "vllm"),
    Headline("decode of one sequence, fp32 weights", "engine", "decode_b1/fp32", "vllm"),
    Headline("decode of 32 sequences, int8 weights", "engine", "decode_b32/int8", "vllm_w8a8"),
    Headline("decode of one sequence, int8 weights", "engine", "decode_b1/int8", "vllm_w8a8"),
    Headline("KV over shared memory, blocks of 1 MiB", "kv", "shm/1MiB", "mooncake"),
    Headline("KV over the network, encrypted, blocks of 1 MiB", "kv", "zmq/1MiB", "mooncake"),
    Headline("placements at 1,000 workers", "router", "decisions/1000", "dict_bitmask"),
    Headline("tokens per CPU second of the gateway", "gateway", "gateway/tok_per_cpu_s", "fastapi"),
    Headline(
        "first token of 2,048 tokens after all workers died, store against none",
        "store",
        "ttft_gain/memory",
    ),
    Headline(
        "requests/s of fluid pools over the better of walled and mixed ones, a load that turns",
        "fluid",
        "fluid/turning",
    ),
    Headline(
        "goodput of fluid pools over the best walled split, simulated",
        "fluid_simulated",
        "goodput_fluid/best_split/conversation_trace",
    ),
    Headline("goodput of planned pools over the best fixed split, simulated", "elastic", "ratio"),
)


BLOCK = re.compile(
    r"^(<!-- (report: [^\n]+?|headline) -->\n).*?(<!-- end -->)", re.DOTALL | re.MULTILINE
)
# Studies that are finished. Their reports are kept, but their programs were removed after this
# commit.
FINISHED = frozenset({"clients", "eviction", "schemas", "simulator", "starts", "tiers"})
LAST_COMMIT = "b099256"
NO_REPORT = "No report is kept yet.\n"

Row = Sequence[str]


def fill_in(
    text: str,
    reports: Mapping[str, Report],
    headlines: Sequence[Headline],
    goals: Mapping[str, Goals] | None = None,
) -> str:
    """Returns the document with all blocks written anew. `goals` has the goals of reports, by name.

    Raises ConfigError if a headline names a result that its report lacks, or if no result matches
    the patterns of a marker.
    """

    def render(block: re.Match[str]) -> str:
        begin, marker, end = block.groups()
        if marker == "headline":
            body = headline_table(headlines, reports)
        else:
            name, *patterns = marker.removeprefix("report: ").split()
            found = (goals or {}).get(name, NO_GOALS)
            body = report_block(name, reports.get(name), patterns, found)
        return f"{begin}{body}{end}"

    return BLOCK.sub(render, text)


def names_in(text: str) -> set[str]:
    """Returns the names of the reports that the document contains."""
    markers = [block[2] for block in BLOCK.finditer(text)]
    return {marker.split()[1] for marker in markers if marker != "headline"}


def report_block(
    name: str, report: Report | None, patterns: Sequence[str], goals: Goals = NO_GOALS
) -> str:
    """Returns command, machine, date and results of a report, as Markdown."""
    if report is None:
        return NO_REPORT
    chosen = [
        result
        for result in report.results
        if not patterns or any(fnmatchcase(result.name, pattern) for pattern in patterns)
    ]
    if not chosen:
        raise ConfigError(f"{name} has no result {' '.join(patterns)}")
    begin, note = (
        ("```text", f"  # at commit {LAST_COMMIT}") if name in FINISHED else ("```bash", "")
    )
    table = results_table(chosen, goals)
    return f"{begin}\n{report.command}{note}\n```\n\n{provenance(report)}\n\n{table}"


def provenance(report: Report) -> str:
    """Returns date, commit, machine and versions of peers as one line."""
    hardware = report.hardware
    versions = [
        f"{name.removeprefix('version_')} {version}"
        for name, version in report.config.items()
        if name.startswith("version_")
    ]
    facts = [
        report.date.partition("T")[0],
        f"commit `{(report.commit or '')[:7]}`",
        hardware.cpu or "unknown CPU",
        f"{hardware.num_cores} cores",
        *hardware.gpus,
        f"Python {hardware.python}",
        f"seed {report.seed}",
        *versions,
    ]
    return " · ".join(facts)


def results_table(results: Sequence[Result], goals: Goals) -> str:
    """Returns a Markdown table with a row for each result, and with the columns that the benchmark
    prints.
    """
    columns = columns_of(results, goals)
    columns["result"] = [f"`{name}`" for name in columns["result"]]
    return _markdown(list(columns), zip(*columns.values(), strict=True))


def headline_table(headlines: Sequence[Headline], reports: Mapping[str, Report]) -> str:
    """Returns a Markdown table with a row for each headline whose report is in `bench/results/`."""
    rows = [
        row_of(headline, reports[headline.report])
        for headline in headlines
        if headline.report in reports
    ]
    if not rows:
        return NO_REPORT
    return _markdown(["figure", "Baton", "beside", "ratio", "command"], rows)


def row_of(headline: Headline, report: Report) -> Row:
    """Returns a row of the headline table. Raises ConfigError if the report lacks the result or the
    peer.
    """
    result = next((r for r in report.results if r.name == headline.result), None)
    if result is None or (headline.peer and headline.peer not in result.peers):
        wanted = f"{headline.result} beside {headline.peer}" if headline.peer else headline.result
        raise ConfigError(f"{headline.report} has no result {wanted}")
    beside = ratio = ""
    if headline.peer:
        peer = result.peers[headline.peer]
        version = report.config.get(f"version_{headline.peer}", "")
        name = f"{headline.peer} {version}".rstrip()
        beside, ratio = f"{name}: {number_text(peer.value)}", f"{peer.ratio:.2f}"
    elif result.limit is not None and result.of_limit is not None:
        beside, ratio = (
            f"this machine's limit: {number_text(result.limit)}",
            f"{result.of_limit:.0%}",
        )
    value = f"{number_text(result.value)} {result.unit}".rstrip()
    # without options, which the benchmark's page contains
    command = report.command.partition(" --")[0]
    return [headline.label, value, beside, ratio, f"`{command}`"]


def _markdown(headers: Sequence[str], rows: Iterable[Row]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


PAGES = (ROOT / "docs").glob("benchmarks/*.md")
# The comparison with Dynamo is finished. Only its report and its goals are kept.
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
    """Returns the documents whose figures differ from the reports, with their new text.

    Raises ConfigError if a report cannot be published, or if no document contains it.
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
