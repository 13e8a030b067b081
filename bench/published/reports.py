"""The reports that the repository keeps: `bench/results/NAME.json`, as `--json` wrote them."""

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

import msgspec

from bench.common.report import Report, from_json, to_json
from engine.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]  # root of the repository
RESULTS = ROOT / "bench" / "results"


def read_reports(folder: Path = RESULTS) -> Mapping[str, Report]:
    """Every report in the folder, by the name of its file without `.json`, in order of names.

    Raises ConfigError if a file is not a report that can be published.
    """
    return {path.stem: read_report(path) for path in sorted(folder.glob("*.json"))}


def read_report(path: Path) -> Report:
    """Reads one report. Raises ConfigError if it cannot be published: see `fault_of`."""
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
    """Returns why a report cannot be published, or None.

    Its figures must come from a commit, which a reader can check out and measure again.
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
