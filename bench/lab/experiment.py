"""The base class of all studies in the lab: options, order of the arms, findings, and a report.

A study is a frozen dataclass. Its fields are the options of its command, the configuration in its
report and the plan of its run. `__post_init__` raises ConfigError for options that do not fit. A
field without a typer option is set by code only: `quick` sets `is_quick`. The class adds the
options `--seed`, `--quick`, `--json` and `--plot`.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class InterferenceStudy(Experiment):
        "Measure how much long prompts hold up running streams."
        streams: Annotated[int, typer.Option(min=1, help="Streams that run at once.")] = 4

        def measure(self, say): ... return Findings(results)

`rounds` runs the arms of a study in an order of its own in each repetition, so that a drift of the
machine affects all arms alike. `results_by_arm` and `held_against` name and compare the figures of
the arms.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from random import Random
from typing import Annotated, ClassVar, Self, TypeVar

import typer
from rich.console import Console

from bench.common.command import (
    JsonOption,
    PlotOption,
    Say,
    SeedOption,
    printed_errors,
    publish,
    quick_option,
    say_on_stderr,
)
from bench.common.plots import plot_report, require_matplotlib
from bench.common.report import (
    NO_GOALS,
    Figure,
    Goals,
    Report,
    Result,
    Scalar,
    report_here,
    results_of,
)
from bench.common.shapes import SHAPES, shape_named
from bench.common.tables import print_lines, print_results
from engine.command_options import expanded
from engine.errors import ConfigError

ShapeOption = Annotated[str, typer.Option(help=f"Random weights: {', '.join(SHAPES)}.")]
Arm = TypeVar("Arm")


@dataclass(frozen=True, slots=True)
class Findings:
    """The results of a study, and warnings that a reader needs before trusting them."""

    results: Sequence[Result]
    warnings: Sequence[str] = ()
    lines: Sequence[str] = ()  # lines that are printed below the table
    config: Mapping[str, Scalar] = field(default_factory=dict)  # further facts, which were measured
    is_whole: bool = True  # False: a part could not be measured, so the command exits with status 1
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)  # samples to plot


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment(ABC):
    """The options of one study. A subclass adds options of its own and the method `measure`."""

    NAME: ClassVar[str]
    QUICK: ClassVar[str]  # the help of `--quick`
    GOALS: ClassVar[Goals] = NO_GOALS

    seed: SeedOption = 0
    is_quick: bool = False

    @property
    def report_name(self) -> str:
        """Returns the name of the report, which is also the command's name."""
        return self.NAME

    @property
    def goals(self) -> Goals:
        """Returns the goals for the results."""
        return self.GOALS

    @property
    def title(self) -> str:
        """Returns the title of the table."""
        return self.NAME

    @abstractmethod
    def quick(self) -> Self:
        """Returns a smaller study of the same kind."""

    @abstractmethod
    def measure(self, say: Say) -> Findings:
        """Runs the study. Raises BatonError."""

    def show(self, console: Console, report: Report) -> None:
        """Prints the results."""
        print_results(console, report, self.goals)

    def plot(self, report: Report, found: Findings, path: Path) -> None:
        """Draws the report as a plot file."""
        plot_report(report, path, title=self.title)

    def config(self) -> dict[str, Scalar]:
        """Returns the options as a flat mapping for the report. Seed, paths and peers are left
        out.
        """
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "seed"}
        return {
            name: value
            if isinstance(value, Scalar)
            # Only file names are reported, because the folders of a machine are not public.
            else ",".join(Path(one).name for one in value)
            for name, value in values.items()
            if name != "peer" and not isinstance(value, Path)
        }


def command_of(kind: type[Experiment]) -> Callable[..., None]:
    """Returns the function from which typer makes the study's command."""

    def command(
        *,
        study: Experiment,
        quick: bool = False,
        json: JsonOption = None,
        plot: PlotOption = None,
    ) -> None:
        _run(study.quick() if quick else study, json, plot)

    command.__annotations__ |= {"study": kind, "quick": Annotated[bool, quick_option(kind.QUICK)]}
    command.__doc__ = kind.__doc__
    return printed_errors()(expanded(command))


def _run(study: Experiment, json: Path | None, plot: Path | None) -> None:
    if plot:
        require_matplotlib()
    found = study.measure(say_on_stderr())
    config = study.config() | dict(found.config)
    report = report_here(study.report_name, seed=study.seed, config=config, results=found.results)
    publish(report, json, title=study.title, show=study.show, warnings=found.warnings)
    print_lines(Console(), found.lines)
    if plot:
        study.plot(report, found, plot)
    if not found.is_whole:
        raise typer.Exit(1)


def rounds(arms: Sequence[Arm], repeat: int, seed: int, say: Say) -> Iterator[tuple[int, Arm]]:
    """Yields each repetition with its arms, in an order that depends on the repetition."""
    for number in range(repeat):
        for arm in order_of(arms, seed, number):
            say(f"repetition {number + 1} of {repeat}: {arm}")
            yield number, arm


def order_of(arms: Sequence[Arm], seed: int, repeat: int) -> list[Arm]:
    """Returns the order of the arms in one repetition."""
    return Random(f"{seed}/order/{repeat}").sample(arms, k=len(arms))


def by_thing(figures: Mapping[str, Mapping[str, Figure]]) -> dict[str, Figure]:
    """Returns the figures by name `thing/arm`: all arms of the first thing, then of the next."""
    things = dict.fromkeys(thing for found in figures.values() for thing in found)
    return {
        f"{thing}/{arm}": found[thing]
        for thing in things
        for arm, found in figures.items()
        if thing in found
    }


def results_by_arm(
    found: Iterable[tuple[int, str, Mapping[str, Figure]]], arms: Iterable[str]
) -> tuple[Result, ...]:
    """Returns the results `thing/arm`. `found` has the figures of each repetition and arm."""
    repeats: dict[int, dict[str, Mapping[str, Figure]]] = {}
    for repeat, arm, figures in found:
        repeats.setdefault(repeat, {})[arm] = figures
    order = [*arms]
    return results_of(
        [by_thing({arm: one[arm] for arm in order if arm in one}) for one in repeats.values()]
    )


def held_against(results: Sequence[Result], peers: Mapping[str, str]) -> tuple[Result, ...]:
    """Returns the results. Each result that `peers` names gets another arm's result of the same
    thing as its peer.

    `peers` maps the name of a result to the arm of its peer.
    """
    values = {result.name: result.value for result in results}
    found = []
    for result in results:
        arm = peers.get(result.name, "")
        theirs = values.get(f"{result.name.rpartition('/')[0]}/{arm}")
        found.append(result.beside({arm: theirs}) if theirs else result)
    return tuple(found)


def check_lengths(shape: str, *lengths: tuple[int, int]) -> None:
    """Raises ConfigError if the input and output tokens together exceed a shape's context."""
    context_len = shape_named(shape).max_positions
    for input_len, output_len in lengths:
        if input_len + output_len > context_len:
            raise ConfigError(
                f"{input_len} tokens in and {output_len} out are more than {shape} has room for:"
                f" {context_len}"
            )
