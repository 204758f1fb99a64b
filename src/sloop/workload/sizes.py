"""How many rows the requests of a trace have, and how large these are: what a user writes under `rows:` and `sizes:`.

It is a number, a list of equally likely numbers, a distribution (`kind:`), a file of equally likely numbers (`file:`),
or a column of the trace's own file (`column:`). The numbers of a column stay with their arrivals. In all other cases
one number is drawn for each arrival of the finished trace, from a random stream of its own, so that no arrival time
changes.
"""

from bisect import bisect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, repeat
from math import floor, log
from operator import itemgetter
from pathlib import Path
from random import Random
from typing import Annotated, Final, Protocol

from sloop.errors import InputError
from sloop.options import NonNegativeFloat, PositiveFloat, Range, Value, read_options
from sloop.streams import stream
from sloop.workload.parse import SourceText, column_entries, read_number, read_text, refuse, split_entries
from sloop.workload.trace import Trace, Work

ROWS: Final = Range(least=1, most=1e6)
SIZES: Final = Range(least=0, most=1e9)
"""Size 0 stands for a model whose rows are all equally large."""


class Numbers(Protocol):
    """Whole numbers that are drawn independently of each other."""

    @property
    def least(self) -> int:
        """The smallest one that is drawn."""
        ...

    @property
    def most(self) -> int:
        """The largest one that is drawn."""
        ...

    def draws(self, rng: Random) -> Iterator[int]:
        """Endless numbers."""
        ...


@dataclass(frozen=True, slots=True)
class WeightedNumbers:
    """One of `values`, in proportion to their `weights`; without weights all are equally likely."""

    values: tuple[int, ...]
    weights: tuple[NonNegativeFloat, ...] = ()

    def __post_init__(self) -> None:
        if self.weights and (len(self.weights) != len(self.values) or not any(self.weights)):
            what = f"{len(self.weights)} weights for {len(self.values)} values"
            raise InputError(what, help="give each value a weight, not all of them 0")

    @property
    def least(self) -> int:
        return min(self.values)

    @property
    def most(self) -> int:
        return max(self.values)

    def draws(self, rng: Random) -> Iterator[int]:
        if len(self.values) == 1:
            return repeat(self.values[0])
        sums = list(accumulate(self.weights or repeat(1.0, len(self.values))))
        return iter(lambda: self.values[bisect(sums, rng.random() * sums[-1], 0, len(sums) - 1)], None)


@dataclass(frozen=True, slots=True)
class UniformNumbers:
    """Each whole number from `least` to `most` is equally likely."""

    least: int
    most: int

    def __post_init__(self) -> None:
        _check_order(self.least, self.most)

    def draws(self, rng: Random) -> Iterator[int]:
        count, random = self.most - self.least + 1, rng.random
        return iter(lambda: self.least + floor(random() * count), None)


@dataclass(frozen=True, slots=True)
class LognormalNumbers:
    """A log-normal distribution: the logarithm is normal with standard deviation `sigma` around that of `median`. The
    lengths of texts are roughly so. A number outside `least` to `most` is cut to the nearer of them, as a tokeniser
    cuts a text."""

    median: PositiveFloat
    sigma: Annotated[float, Range(least=0, most=10)]
    most: int
    least: int = 1

    def __post_init__(self) -> None:
        _check_order(self.least, self.most)

    def draws(self, rng: Random) -> Iterator[int]:
        mu, lognormal = log(self.median), rng.lognormvariate
        return iter(lambda: min(self.most, max(self.least, round(lognormal(mu, self.sigma)))), None)


def _check_order(least: int, most: int) -> None:
    if least > most:
        raise InputError(f"least {least} is above most {most}", help="exchange them")


KINDS: Final[Mapping[str, type[WeightedNumbers | UniformNumbers | LognormalNumbers]]] = {
    "choice": WeightedNumbers,
    "uniform": UniformNumbers,
    "lognormal": LognormalNumbers,
}


@dataclass(frozen=True, slots=True)
class NumberColumn:
    """The numbers in a `file`, each equally likely. If no file is named: those in a column of the trace's own file,
    each for its own request."""

    column: str = ""
    file: Path | None = None
    member: str = ""
    """The file of an archive to read."""

    def __post_init__(self) -> None:
        if self.file is None and not self.column:
            raise InputError("neither a `kind`, a `file` nor a `column`", help=f"kinds: {', '.join(KINDS)}")


NumbersOption = WeightedNumbers | UniformNumbers | LognormalNumbers | NumberColumn
"""What a user declares."""


def read_numbers(value: Value, limits: Range) -> NumbersOption:
    """What a user declares, with all numbers within `limits`; no file is opened. InputError for a mistake in it."""
    if not isinstance(value.content, Mapping):
        listed = [each.integer(least=limits.least, most=limits.most) for each in value.one_or_more()]
        if not listed:
            value.wrong("a number, a list of numbers or a distribution")
        return WeightedNumbers(tuple(listed))
    fields = value.mapping()
    if "kind" not in fields:
        return read_options(NumberColumn, value)
    made = read_options(fields["kind"].entry(KINDS, "kind of distribution"), value, also=("kind",))
    for number in (made.least, made.most):
        if not limits.hold(number):
            value.fail(f"{number} is out of range", f"numbers{limits.text(number)}")
    return made


def numbers_from(value: Value, limits: Range, folder: Path) -> Numbers:
    """The distribution that a user declares without a trace. InputError for a mistake in it or in its file."""
    declared = read_numbers(value, limits)
    if isinstance(declared, NumberColumn) and declared.file is None:
        value.fail(f"of which file is {declared.column!r} a column?", "name its `file`")
    return numbers_of(declared, limits, folder)


def drawn(trace: Trace, *, seed: int, rows: Numbers | None, sizes: Numbers | None) -> Trace:
    """The trace with newly drawn rows and sizes of its requests. None: the requests keep the rows, or sizes, that they
    have."""
    names = [name for name, numbers in (("rows", rows), ("sizes", sizes)) if numbers is not None]
    if not names:
        return trace
    had = trace.works

    def works() -> Iterator[Work]:
        own_rows: Iterator[int] = map(itemgetter(0), had()) if had else repeat(1)
        own_sizes: Iterator[int] = map(itemgetter(1), had()) if had else repeat(0)
        return map(
            Work,
            own_rows if rows is None else rows.draws(stream(seed, "rows")),
            own_sizes if sizes is None else sizes.draws(stream(seed, "sizes")),
        )

    provenance = f"{trace.provenance}, {' and '.join(names)} drawn with seed {seed}"
    return replace(trace, provenance=provenance, works=works)


def numbers_of(declared: NumbersOption, limits: Range, folder: Path) -> Numbers:
    """The distribution that is declared; relative file names start at `folder`. InputError for a mistake in its file.

    `declared` must not be a column of the trace's own file: this is read with the trace.
    """
    if not isinstance(declared, NumberColumn):
        return declared
    assert declared.file is not None, f"{declared} is in the trace's own file"
    text = read_text(folder / declared.file, member=declared.member)
    found = tuple(numbers_in(text, declared.column, limits))
    if not found:
        refuse(text.where, "there are no numbers in it", "write one per line, or name a `column`")
    return WeightedNumbers(found)


def numbers_in(text: SourceText, column: str, limits: Range) -> Iterator[int]:
    """The whole numbers of a column of a CSV file or, without a `column`, of a text."""
    for entry in column_entries(text, column, ()) if column else split_entries(text):
        number = read_number(entry.text, limits, f"{text.where}:{entry.line}")
        if number != int(number):
            refuse(text.where, f"{entry.text} is not a whole number", "correct that entry", entry.line)
        yield int(number)
