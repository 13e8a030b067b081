"""The plot of `bench kv`: bandwidth over block size, and the phases after a handoff."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.common.plots import save_figure
from bench.common.report import Report
from bench.lab.kv.cases import LIMIT_OF, MIB, TOTAL_BYTES, bytes_of, size_name, split_of
from bench.lab.kv.figures import AFTER_HANDOFF, PHASES

Line = Mapping[int, float]  # GiB/s by bytes of a block

COLOURS = {"shm": "tab:blue", "zmq": "tab:orange", "nixl": "tab:green"}
PEER_COLOURS = ("tab:red", "tab:purple", "tab:brown")


def plot_kv(report: Report, path: Path, *, title: str) -> None:
    """Writes the figure as PNG. It has a second panel if handoffs were measured."""
    from matplotlib.figure import Figure

    phases = phases_of(report)
    figure = Figure(figsize=(11 if phases else 6.5, 4.2), layout="constrained")
    panels = figure.subplots(1, 2 if phases else 1, squeeze=False)[0]
    _draw_lines(panels[0], report)
    if phases:
        _draw_phases(panels[1], phases)
    title = f"{title}\n{report.hardware.cpu}, commit {report.commit}"
    save_figure(figure, path, title=title)


def lines_of(report: Report) -> tuple[dict[str, Line], dict[str, Line]]:
    """Bandwidths of whole transfers by mover: those of Baton and its limits, and those of peers."""
    movers: dict[str, dict[int, float]] = {}
    peers: dict[str, dict[int, float]] = {}
    for result in report.results:
        mover, _, size = result.name.partition("/")
        if result.unit != "GiB/s" or "/" in size or split_of(mover)[1] is not None:
            continue
        movers.setdefault(mover, {})[bytes_of(size)] = result.value
        for name, peer in result.peers.items():
            peers.setdefault(name, {})[bytes_of(size)] = peer.value
    return {**movers}, {**peers}


def phases_of(report: Report) -> dict[str, dict[str, float]]:
    """Milliseconds of each phase from the first token to the second, by transport."""
    found: dict[str, dict[str, float]] = {}
    for result in report.results:
        thing, *rest = result.name.split("/")
        if thing == AFTER_HANDOFF:
            phase, transport = rest
            found.setdefault(transport, {})[phase] = result.value
    return found


def _draw_lines(panel: Any, report: Report) -> None:
    movers, peers = lines_of(report)
    sizes = sorted({size for line in (*movers.values(), *peers.values()) for size in line})
    places = {size: place for place, size in enumerate(sizes)}
    colours = {**COLOURS, **{limit: COLOURS[mover] for mover, limit in LIMIT_OF.items()}}

    def draw(name: str, line: Line, colour: str, style: str) -> None:
        ordered = sorted(line)
        values = [line[size] for size in ordered]
        at = [places[size] for size in ordered]
        fill = "full" if name in COLOURS else "none"  # distinguishes lines of one point
        panel.plot(
            at, values, style, color=colour, label=name, marker="o", markersize=4, fillstyle=fill
        )

    for name, line in movers.items():
        draw(name, line, colours[name], "-" if name in COLOURS else "--")
    for (name, line), colour in zip(peers.items(), PEER_COLOURS, strict=False):
        draw(name, line, colour, ":")
    panel.set_xticks(range(len(sizes)), [size_name(size) for size in sizes])
    panel.set(xlabel="bytes of a block", ylabel="GiB/s", ylim=(0, None))
    what = f"{TOTAL_BYTES // MIB} MiB in scattered blocks; dashed: limits, dotted: peers"
    panel.set_title(what, fontsize="small")
    panel.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=4)
    panel.grid(alpha=0.3)


def _draw_phases(panel: Any, phases: Mapping[str, Mapping[str, float]]) -> None:
    transports = list(phases)
    bottoms = [0.0] * len(transports)
    for phase in PHASES:
        heights = [phases[transport].get(phase, 0.0) for transport in transports]
        panel.bar(transports, heights, bottom=bottoms, width=0.5, label=phase.replace("_", " "))
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    panel.set(ylabel="ms, first token to second", xlim=(-0.6, len(transports) - 0.4))
    panel.margins(y=0.2)  # room for the legend
    panel.set_title("after the handoff", fontsize="small")
    panel.legend(fontsize="small", loc="upper center", ncols=len(PHASES))
    panel.set_axisbelow(True)
    panel.grid(axis="y", alpha=0.3)
