"""Computes the results of `bench schemas`. Pure.

| result                | unit |                                                              |
|-----------------------|------|--------------------------------------------------------------|
| schemas/accepted      | %    | compiled; limit: all                                         |
| schemas/passing       | %    | compiled, and right about all of their tests                 |
| accepted/DATASET      | %    | the same as the first, of one dataset                        |
| tests/allowed         | %    | of valid texts of accepted schemas; limit: all               |
| tests/refused         | %    | of invalid texts of accepted schemas; limit: all             |
| walks/ended           | %    | of random walks along masks: they came to an end             |
| walks/valid           | %    | of these: the text validates; limit: all                     |
| compile/50th, 99th    | ms   | up to the first mask, of accepted schemas                    |
| mask/50th, 99th       | us   | one mask, along the tests                                    |

Peers are on the same schemas. Times of an engine are over the schemas that it accepts.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bench.common.report import Result, result_of
from bench.common.stats import percentile
from bench.lab.schemas.cases import SchemaCase
from bench.lab.schemas.ours import NAME

GOAL = 90.0  # percent of schemas
MAX_NAMED = 5  # schemas in a warning
PERCENTS = (50, 99)  # percentiles of times


@dataclass(frozen=True, slots=True)
class Judged:
    """One engine and one schema. Without `refusal` and `failure`, the schema was accepted."""

    engine: str
    case: SchemaCase
    refusal: str | None = None
    failure: str | None = None  # the engine died, or took too long
    compile_s: float = 0.0
    masks_us: tuple[float, ...] = ()
    allowed: tuple[bool, ...] = ()  # for each test: True if the engine allowed the text
    num_walks: int = 0
    walks: tuple[tuple[str, bool], ...] = ()  # texts of completed walks; True if the text is valid

    @property
    def is_accepted(self) -> bool:
        """True if the engine follows the schema."""
        return self.refusal is None and self.failure is None

    @property
    def is_passing(self) -> bool:
        """True if the engine is right about all tests."""
        wanted = [test.is_valid for test in self.case.tests]
        return self.is_accepted and wanted == list(self.allowed)

    def of_tests(self, *, valid: bool) -> list[bool]:
        """Yields for each valid (or each invalid) text if it was allowed."""
        pairs = zip(self.case.tests, self.allowed, strict=False)
        return [allowed for test, allowed in pairs if test.is_valid is valid]


@dataclass(frozen=True, slots=True)
class SchemasMeasured:
    """All that was measured."""

    cases: tuple[SchemaCase, ...]
    judged: tuple[Judged, ...]
    versions: Mapping[str, str] = field(default_factory=dict)

    def of(self, engine: str) -> list[Judged]:
        """Returns the verdicts of one engine."""
        return [each for each in self.judged if each.engine == engine]

    @property
    def engines(self) -> list[str]:
        """The names of the engines, ours first."""
        return list(dict.fromkeys(each.engine for each in self.judged))


Measure = Callable[[Sequence[Judged]], float | None]  # None: there was nothing to measure


def results(measured: SchemasMeasured) -> tuple[Result, ...]:
    """All results, in the order of the table above."""
    found = [
        _result(measured, "schemas/accepted", "%", _accepted, limit=100.0),
        _result(measured, "schemas/passing", "%", _passing, limit=100.0),
    ]
    for dataset in sorted({case.dataset for case in measured.cases}):
        found.append(_result(measured, f"accepted/{dataset}", "%", _accepted_of(dataset)))
    found += [
        _result(measured, "tests/allowed", "%", _allowed, limit=100.0),
        _result(measured, "tests/refused", "%", _refused, limit=100.0),
        _result(measured, "walks/ended", "%", _ended),
        _result(measured, "walks/valid", "%", _valid, limit=100.0),
    ]
    for percent in PERCENTS:
        found.append(_result(measured, f"compile/{percent}th", "ms", _compile(percent)))
    for percent in PERCENTS:
        found.append(_result(measured, f"mask/{percent}th", "us", _mask(percent)))
    return tuple(result for result in found if result is not None)


def warnings(measured: SchemasMeasured) -> list[str]:
    """A line for each fault of ours, for each missed goal, and for what engines refuse most."""
    ours = measured.of(NAME)
    lines: list[str] = []
    accepted = _accepted(ours) or 0.0
    if accepted < GOAL:
        lines.append(f"{accepted:.1f} % of schemas are accepted; the goal is {GOAL:.0f} %")
    wrong = [each.case.name for each in ours if any(each.of_tests(valid=False))]
    if wrong:
        lines.append(f"invalid tests are allowed by {len(wrong)} schemas: {_some(wrong)}")
    invalid = [each.case.name for each in ours if not all(is_valid for _, is_valid in each.walks)]
    if invalid:
        lines.append(f"walks give invalid texts for {len(invalid)} schemas: {_some(invalid)}")
    for engine in measured.engines:
        failures = [each.case.name for each in measured.of(engine) if each.failure is not None]
        if failures:
            lines.append(f"{engine} died or was too slow for {len(failures)}: {_some(failures)}")
    return lines


def reasons(judged: Iterable[Judged]) -> list[tuple[str, int]]:
    """Returns an engine's reasons of refusals with the number of schemas, the most frequent
    first.
    """
    counts = Counter(_reason(each.refusal) for each in judged if each.refusal is not None)
    return counts.most_common()


def _reason(refusal: str) -> str:
    """Returns the general beginning of a message, without the part about a single schema."""
    begin = refusal.partition(" (at ")[0].partition(": ")
    first, _, rest = begin
    return " ".join(f"{first}: {rest}".split()[:8]) if rest else first[:60]


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MAX_NAMED])
    return shown if len(names) <= MAX_NAMED else f"{shown}, …"


def _result(
    measured: SchemasMeasured,
    name: str,
    unit: str,
    measure: Measure,
    *,
    limit: float | None = None,
) -> Result | None:
    """Our figure beside the peers'; None if we have none."""
    figures = {engine: measure(measured.of(engine)) for engine in measured.engines}
    ours = figures.pop(NAME, None)
    if ours is None:
        return None
    result = result_of(name, [ours], unit)
    result = result if limit is None else result.limited(limit)
    return result.beside({engine: value for engine, value in figures.items() if value})


def _accepted(judged: Sequence[Judged]) -> float | None:
    return _percent(each.is_accepted for each in judged)


def _accepted_of(dataset: str) -> Measure:
    return lambda judged: _accepted([each for each in judged if each.case.dataset == dataset])


def _passing(judged: Sequence[Judged]) -> float | None:
    return _percent(each.is_passing for each in judged)


def _allowed(judged: Sequence[Judged]) -> float | None:
    return _percent(ok for each in judged if each.is_accepted for ok in each.of_tests(valid=True))


def _refused(judged: Sequence[Judged]) -> float | None:
    tests = (ok for each in judged if each.is_accepted for ok in each.of_tests(valid=False))
    return _percent(not ok for ok in tests)


def _ended(judged: Sequence[Judged]) -> float | None:
    number = sum(each.num_walks for each in judged)
    return 100.0 * sum(len(each.walks) for each in judged) / number if number else None


def _valid(judged: Sequence[Judged]) -> float | None:
    return _percent(is_valid for each in judged for _, is_valid in each.walks)


def _compile(percent: int) -> Measure:
    def measure(judged: Sequence[Judged]) -> float | None:
        times = [1e3 * each.compile_s for each in judged if each.is_accepted]
        return percentile(times, percent) if times else None

    return measure


def _mask(percent: int) -> Measure:
    def measure(judged: Sequence[Judged]) -> float | None:
        times = [us for each in judged for us in each.masks_us]
        return percentile(times, percent) if times else None

    return measure


def _percent(flags: Iterable[bool]) -> float | None:
    found = list(flags)
    return 100.0 * sum(found) / len(found) if found else None
