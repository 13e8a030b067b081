"""Bars of the slowest requests of a load: waits, tokens, the server's stages. Pure."""

from collections.abc import Mapping
from html import escape

from bench.client.answers import Answer
from bench.client.load import MEASURES, LoadRun, RequestOutcome

NUM_SLOWEST = 20
BAR_WIDTH = 1040
MOST_TICKS = 400  # ticks of chunks in one bar
WAIT, FIRST, REST = (f'class="{name}" height="16"' for name in ("wait", "first", "rest"))
STAGE_COLOURS = ("#0072b2", "#cc79a7", "#f0e442", "#009e73", "#d55e00", "#8c6bb1", "#7fbf3f")


def slowest_of(run: LoadRun) -> list[tuple[RequestOutcome, Answer]]:
    """The answers that took longest from their due time, the slowest first."""
    ordered = sorted(run.answered, key=lambda pair: -(pair[0].delay_s + pair[1].e2e_s))
    return ordered[:NUM_SLOWEST]


def timelines_of(run: LoadRun) -> list[str]:
    """A legend, then a bar for each of the slowest requests, as HTML."""
    slowest = slowest_of(run)
    if not slowest:
        return ["<p>No request was answered.</p>"]
    one, answer = slowest[0]
    longest_s = (one.delay_s + answer.e2e_s) or 1.0
    stages = dict.fromkeys(name for _, answer in slowest for name in _stages(answer))
    colours = {name: STAGE_COLOURS[n % len(STAGE_COLOURS)] for n, name in enumerate(stages)}
    bars = (_bar(one, answer, BAR_WIDTH / longest_s, colours) for one, answer in slowest)
    return [_legend(colours), *bars]


def _legend(colours: Mapping[str, str]) -> str:
    """What the colours of the bars mean."""
    own = {
        "from the due time to sending": "#999",
        "until the first token": "#e69f00",
        "until the last token, with a mark for each chunk": "#56b4e9",
    }
    told = f"<br>The thin bar has the server's own stages: {_named(colours)}" if colours else ""
    return f'<p class="legend">{_named(own)}{told}</p>'


def _named(colours: Mapping[str, str]) -> str:
    keys = (
        f'<span><i style="background:{colour}"></i>{escape(name)}</span>'
        for name, colour in colours.items()
    )
    return " ".join(keys)


def _stages(answer: Answer) -> dict[str, float]:
    """The server's stages, which follow each other. Durations that overlap them are left out."""
    return {name: value for name, value in answer.timeline_s.items() if name not in MEASURES}


def _bar(one: RequestOutcome, answer: Answer, per_s: float, colours: Mapping[str, str]) -> str:
    wait, first = one.delay_s * per_s, answer.ttft_s * per_s
    rest = (answer.e2e_s - answer.ttft_s) * per_s
    times_s = answer.chunk_times_s[:: len(answer.chunk_times_s) // MOST_TICKS + 1]
    ticks = "".join(
        f'<path class="tick" d="M{wait + (at_s - answer.sent_s) * per_s:.1f} 0v16"/>'
        for at_s in times_s
    )
    stages, at = [], wait
    for name, value in _stages(answer).items():
        stages.append(_box(at, value * per_s, f'y="18" height="6" fill="{colours[name]}"'))
        at += value * per_s
    listed = " · ".join(f"{name} {value * 1e3:.1f} ms" for name, value in answer.timeline_s.items())
    told = (
        f"session {one.session}, turn {one.turn}, due at {one.due_s:.2f} s: waited"
        f" {one.delay_s * 1e3:.1f} ms, TTFT {answer.ttft_s * 1e3:.1f} ms,"
        f" E2E {answer.e2e_s * 1e3:.1f} ms, {answer.num_output_tokens} tokens"
    )
    return (
        f'<div class="slow">{escape(told)}<br><svg width="{BAR_WIDTH}"'
        f' height="{24 if stages else 16}" role="img" aria-label="{escape(told)}">'
        f"{_box(0, wait, WAIT)}{_box(wait, first, FIRST)}{_box(wait + first, rest, REST)}"
        f"{ticks}{''.join(stages)}</svg><br><small>{escape(listed)}</small></div>"
    )


def _box(x: float, width: float, style: str) -> str:
    return f'<rect x="{x:.1f}" width="{width:.1f}" {style}/>'
