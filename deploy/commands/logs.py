"""`baton logs`: the latest log lines of a deployment's processes, in order of time."""

import textwrap
import threading
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer
from rich.markup import escape

from deploy.admin.client import AdminClient
from deploy.admin.schema import LogsAnswer
from deploy.commands.events import Follow
from deploy.commands.options import ServiceName, operates
from deploy.commands.views import WATCH_EVERY_S, Output
from deploy.logs.lines import escaped
from deploy.logs.reading import DEFAULT_LINES, MAX_LINES

logs_app = typer.Typer()  # its command stands at the top level

_STYLES = {"critical": "bold red", "error": "red", "warning": "yellow", "debug": "dim"}

Lines = Annotated[
    int, typer.Option("-n", "--lines", min=0, max=MAX_LINES, help="how many of the last lines")
]


@operates(logs_app.command("logs"))
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
    """Returns a line in rich's markup. Terminal control characters are escaped."""
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
    """Yields later answers until Ctrl-C or the end of the deployment."""
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
