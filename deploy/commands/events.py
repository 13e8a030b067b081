"""`baton events`: the steps of the pools and the planner's decisions, in order of time."""

import threading
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

import msgspec
import typer
from rich.markup import escape

from deploy.admin.client import AdminClient
from deploy.admin.schema import DecisionInfo, StepInfo
from deploy.commands.options import operates
from deploy.commands.views import WATCH_EVERY_S, Output
from engine.control import with_role
from engine.messages import Role

events_app = typer.Typer()  # its command stands at the top level

Follow = Annotated[bool, typer.Option("-f", "--follow", help="print new ones until Ctrl-C")]


class EventLine(msgspec.Struct, frozen=True):
    """A step of the pools (a flip, death, join or version) or a decision of the planner."""

    kind: Literal["step", "decision"]
    number: int  # number of the step, or of the decision
    age_s: float
    subject: str
    what: str
    why: tuple[str, ...]
    role: Role | None = None


class PoolEvents:
    """Merges answers into events, and yields each event once."""

    def __init__(self) -> None:
        self.last_step = 0
        self._last_decision = 0

    def new(
        self, steps: Iterable[StepInfo], decisions: Iterable[DecisionInfo]
    ) -> Iterator[EventLine]:
        """Yields the events since the last call, oldest first."""
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
    """Returns an event with its reasons, in rich's markup."""
    why = f"[dim]: {escape('; '.join(event.why))}[/dim]" if event.why else ""
    subject, what = escape(with_role(event.subject, event.role)), escape(event.what)
    return f"{event.age_s:7.0f} s ago  [bold]{subject}[/bold] {what}{why}"


def _outcome(decision: DecisionInfo) -> str:
    said = f"{decision.mode}: {decision.summary}"
    return f"{said} (refused: {decision.why_refused})" if decision.why_refused else said
