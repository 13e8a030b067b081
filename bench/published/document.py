"""Fills the blocks of a Markdown document in from reports. Pure.

A block is the text between its marker and the next `<!-- end -->`. Markers:

    <!-- report: NAME -->            all results of bench/results/NAME.json, and where they are from
    <!-- report: NAME a/* b/c -->    only the results whose names match a pattern
    <!-- headline -->                the rows of `bench.published.headline`

All other text of a document is written by hand and stays as it is.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from bench.common.goals import NO_GOALS, Goals
from bench.common.report import Report, Result
from bench.common.tables import columns_of, number_text
from bench.published.headline import Headline
from engine.errors import ConfigError

BLOCK = re.compile(
    r"^(<!-- (report: [^\n]+?|headline) -->\n).*?(<!-- end -->)", re.DOTALL | re.MULTILINE
)
# Finished studies: their reports are kept; their programs were removed after this commit.
FINISHED = frozenset({"clients", "eviction", "simulator", "starts", "tiers"})
LAST_COMMIT = "b099256"
NO_REPORT = "No report is kept yet.\n"

Row = Sequence[str]


def fill_in(
    text: str,
    reports: Mapping[str, Report],
    headlines: Sequence[Headline],
    goals: Mapping[str, Goals] | None = None,
) -> str:
    """Returns the document with every block rendered anew; `goals` has the reports' goals, by name.

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
    """Names of the reports that the document shows."""
    markers = [block[2] for block in BLOCK.finditer(text)]
    return {marker.split()[1] for marker in markers if marker != "headline"}


def report_block(
    name: str, report: Report | None, patterns: Sequence[str], goals: Goals = NO_GOALS
) -> str:
    """Command, place, time and results of a report, as Markdown."""
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
    """Date, commit, machine and versions of peers, in one line."""
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
    """A row for each result, with the columns that the benchmark prints."""
    columns = columns_of(results, goals)
    columns["result"] = [f"`{name}`" for name in columns["result"]]
    return _markdown(list(columns), zip(*columns.values(), strict=True))


def headline_table(headlines: Sequence[Headline], reports: Mapping[str, Report]) -> str:
    """Returns a row for each headline whose report is in `bench/results/`."""
    rows = [
        row_of(headline, reports[headline.report])
        for headline in headlines
        if headline.report in reports
    ]
    if not rows:
        return NO_REPORT
    return _markdown(["figure", "Baton", "beside", "ratio", "command"], rows)


def row_of(headline: Headline, report: Report) -> Row:
    """Raises ConfigError if the report lacks the result or the peer."""
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
    command = report.command.partition(" --")[0]  # the page of the benchmark has its options
    return [headline.label, value, beside, ratio, f"`{command}`"]


def _markdown(headers: Sequence[str], rows: Iterable[Row]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
