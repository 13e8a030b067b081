"""`baton events`: the steps of the pools and the planner's decisions, in order of time.

`baton logs`: the latest log lines of a deployment's processes, in order of time.
"""

import textwrap
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
import typer
from rich.markup import escape

from deploy.admin.client import AdminClient
from deploy.admin.schema import DecisionInfo, LogsAnswer, StepInfo
from deploy.commands.options import ServiceName, operates
from deploy.commands.views import WATCH_EVERY_S, Output
from deploy.logs.lines import escaped
from deploy.logs.reading import DEFAULT_LINES, MAX_LINES
from engine.control import with_role
from engine.messages import Role

events_app = typer.Typer()  # its commands are direct subcommands of `baton`

Follow = Annotated[bool, typer.Option("-f", "--follow", help="print new ones until Ctrl-C")]


class EventLine(msgspec.Struct, frozen=True):
    """A step of the pools (a flip, death, join or version) or a decision of the planner."""

    kind: Literal["step", "decision"]
    number: int  # number of the step or of the planner's decision
    age_s: float
    subject: str
    what: str
    why: tuple[str, ...]
    role: Role | None = None


class PoolEvents:
    """Merges the API's answers into events, and yields each event once."""

    def __init__(self) -> None:
        self.last_step = 0
        self._last_decision = 0

    def new(
        self, steps: Iterable[StepInfo], decisions: Iterable[DecisionInfo]
    ) -> Iterator[EventLine]:
        """Yields the events that earlier calls have not yielded, oldest first."""
        events = [
            EventLine(
                "step", s.number, s.age_s, s.subject, s.what, (s.why,) if s.why else (), s.role
            )
            for s in steps
            if s.number > self.last_step
        ]
        events += [
            EventLine("decision", d.number, d.age_s, "planner", _outcome(d), d.reasons)
            for d in decisions
            if d.number > self._last_decision
        ]
        for event in sorted(events, key=lambda event: -event.age_s):
            if event.kind == "step":
                self.last_step = max(self.last_step, event.number)
            else:
                self._last_decision = max(self._last_decision, event.number)
            yield event


@operates(events_app.command("events"))
def events_command(client: AdminClient, output: Output, *, follow: Follow = False) -> None:
    """Shows flips, deaths, joins, versions and the planner's decisions, with their reasons."""
    log, pause = PoolEvents(), threading.Event()
    while True:
        steps = client.pools(since=log.last_step).steps
        for event in log.new(steps, client.planner().decisions):
            if output.as_json:
                output.json(event)
            else:
                output.line(event_line(event))
        if not follow:
            return
        pause.wait(WATCH_EVERY_S)


def event_line(event: EventLine) -> str:
    """Returns an event with its reasons as text in rich's markup."""
    why = f"[dim]: {escape('; '.join(event.why))}[/dim]" if event.why else ""
    subject, what = escape(with_role(event.subject, event.role)), escape(event.what)
    return f"{event.age_s:7.0f} s ago  [bold]{subject}[/bold] {what}{why}"


def _outcome(decision: DecisionInfo) -> str:
    said = f"{decision.mode}: {decision.summary}"
    return f"{said} (refused: {decision.why_refused})" if decision.why_refused else said


_STYLES = {"critical": "bold red", "error": "red", "warning": "yellow", "debug": "dim"}

Lines = Annotated[
    int, typer.Option("-n", "--lines", min=0, max=MAX_LINES, help="how many of the last lines")
]


@operates(events_app.command("logs"))
def logs_command(
    client: AdminClient,
    output: Output,
    service: ServiceName = None,
    *,
    follow: Follow = False,
    lines: Lines = DEFAULT_LINES,
) -> None:
    """Shows the latest log lines, also of workers that have died."""
    answer = client.logs(service, lines)
    _show(answer, output)
    if not (follow or answer.lines or output.as_json):
        output.line("[dim]no lines yet; `baton serve --log-level info` logs more[/dim]")
    if follow:
        for later in _later(client, service, answer.after):
            _show(later, output)


def log_line(line: Mapping[str, Any]) -> str:
    """Returns a log line as text in rich's markup. Terminal control characters are escaped."""
    told = {name: escaped(str(value)) for name, value in line.items() if name != "exception"}
    level = told.get("level", "")
    style = _STYLES.get(level, "default")
    request = f" [request {told['request']}]" if "request" in told else ""
    text = (
        f"[dim]{escape(told.get('time', ''))}[/dim] [bold]{escape(told.get('process', ''))}[/bold] "
        f"[{style}]{escape(level)}[/{style}] {escape(told.get('logger', ''))}: "
        f"{escape(told.get('message', ''))}{escape(request)}"
    )
    if "exception" in line:
        lines = (escaped(each) for each in str(line["exception"]).split("\n"))
        text += "\n" + escape(textwrap.indent("\n".join(lines), "    "))
    return text


def _later(client: AdminClient, service: str | None, after: str) -> Iterator[LogsAnswer]:
    """Queries later log lines and yields the answers, until Ctrl-C or the deployment's end."""
    pause, has_more = threading.Event(), False
    while True:
        if not has_more:
            pause.wait(WATCH_EVERY_S)
        answer = client.logs(service, after=after)
        after, has_more = answer.after, answer.has_more
        yield answer


def _show(answer: LogsAnswer, output: Output) -> None:
    for name in answer.overwritten:
        output.note(f"lines of {name} are missing here: it wrote more than is kept")
    for name in answer.silent:
        output.note(f"node {name} did not answer: its lines are missing here")
    for line in answer.lines:
        if output.as_json:
            output.json(line)
        else:
            output.line(log_line(line))
