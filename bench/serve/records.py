"""One row for each request of a load, as CSV and for comparisons. Pure.

Times are seconds from the start of the run, latencies milliseconds. Cells of latencies that a
request does not have are empty.
"""

import csv
import io
from collections.abc import Sequence

from bench.client.answers import Answer
from bench.client.load import LoadRun, RequestOutcome, SloBounds, meets

COLUMNS = (
    "run",
    "session",
    "turn",
    "due_s",
    "send_lag_ms",
    "slot_wait_ms",
    "ttft_ms",
    "ttft_due_ms",
    "tpot_ms",
    "e2e_ms",
    "e2e_due_ms",
    "longest_gap_ms",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "within_slo",
    "error",
)


def csv_of(runs: Sequence[LoadRun], slo: SloBounds | None) -> str:
    """The CSV of all requests, in order of run and due time."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for number, run in enumerate(runs):
        for one in run.outcomes:
            writer.writerow([number, *_cells(one, slo)])
    return text.getvalue()


def _cells(one: RequestOutcome, slo: SloBounds | None) -> list[object]:
    begin = [one.session, one.turn, f"{one.due_s:.6f}", _ms(one.send_lag_s), _ms(one.slot_wait_s)]
    result = one.result
    if not isinstance(result, Answer):
        return [*begin, *[""] * 9, *(["no"] if slo else [""]), result.kind]
    return [
        *begin,
        _ms(result.ttft_s),
        _ms(result.ttft_s + one.delay_s),
        _ms(result.tpot_s),
        _ms(result.e2e_s),
        _ms(result.e2e_s + one.delay_s),
        _ms(max(result.gaps_s, default=None)),
        _text(result.num_prompt_tokens),
        _text(result.num_cached_tokens),
        result.num_output_tokens,
        "" if slo is None else ("yes" if meets(result, slo, delay_s=one.delay_s) else "no"),
        "",
    ]


def _ms(value_s: float | None) -> str:
    return "" if value_s is None else f"{value_s * 1e3:.3f}"


def _text(value: int | None) -> str:
    return "" if value is None else str(value)
