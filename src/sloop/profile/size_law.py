"""What the size of rows does to a batch's duration, learnt from finished batches where the profile does not say.

A batch of n rows takes u·F + v·R(n). F and R are the two parts of what the profile says of n rows: what a batch takes
whatever its rows, and the rest. The overhead u is the same for all sizes; v is one number for each class of sizes, and
near p + q·size + c·size², as a transformer with its attention takes. The fit is by least squares of relative errors, so
a batch that a pause made ten times as long counts a hundredth.
Deterministic: the same batches in the same order give the same numbers.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import combinations, product, starmap
from operator import add, attrgetter, mul
from typing import Final

from msgspec import Struct, field

FADE_BATCHES: Final = 64
"""After so many batches, earlier ones count less: those of a class in its own number, all of them in what is common."""
KEPT: Final = 0.5
"""The weight that a batch keeps of its former one then."""
SHARE_KEPT: Final = 0.97
"""The same for the shares of classes. They are noisy, and every change of them changes the mean that plans are made
with, so they are taken over some 2,000 batches."""
PRIOR_BATCHES: Final = 0.003
"""How many batches the profile counts as: enough where nothing else decides, and less than the first one."""
LAW_BATCHES: Final = 0.5
"""How many batches of a class the law counts as in the number of this class."""


class ClassLesson(Struct, frozen=True, array_like=True, gc=False):
    """What policies see of one class."""

    size: int
    """Its largest size."""
    share: float
    """The fraction of the rows that are of this class."""
    correction: float
    """The factor on what is expected of its batches."""
    prior_weight: float
    """How much the profile still counts."""
    per_row: float
    """v; without meaning if the profile knows sizes."""


_SIZE_OF = attrgetter("size")


class SizeLessons(Struct, frozen=True, array_like=True):
    """What policies see of all classes that had a batch."""

    classes: tuple[ClassLesson, ...] = ()
    """Ascending."""
    expected: float = 1.0
    """The factor for classes that had no batch: the mean over the rows of those that had enough."""
    overhead: float = 1.0
    """u."""
    slope: float = 0.0
    """q."""
    curve: float = 0.0
    """c."""

    def of(self, size: int) -> ClassLesson | None:
        """The lesson about this class; None if it had no batch."""
        at = bisect_left(self.classes, size, key=_SIZE_OF)
        return self.classes[at] if at < len(self.classes) and self.classes[at].size == size else None

    def around(self, size: int) -> tuple[int, int]:
        """The next classes below and above this one that had a batch, by their sizes; 0 for none."""
        below, above = (bisect_left(self.classes, each, key=_SIZE_OF) for each in (size, size + 1))
        return (
            self.classes[below - 1].size if below else 0,
            self.classes[above].size if above < len(self.classes) else 0,
        )

    def per_row(self, size: int, unit: int) -> float:
        """v for a class: its own number, or that of the nearest class with what q and c say of the difference. Before
        the first batch, in proportion to the size if rows of `unit` are known to take what the profile says; 1 if
        not."""
        if not self.classes:
            return size / unit if unit else 1.0
        at = bisect_left(self.classes, size, key=_SIZE_OF)
        near = self.classes[min(at, len(self.classes) - 1)]
        return max(0.0, near.per_row + (size - near.size) * (self.slope + self.curve * (size + near.size)))


NO_LESSONS: Final = SizeLessons()


class ClassFigures(Struct):
    """What the batches of one class have taught: sums over them of r = R/t, f·r = F/t · R/t and r², with t the measured
    duration."""

    rows: float = 0.0
    seen: int = 0
    """How many batches there were."""
    batches: float = 0.0
    """How many count."""
    r: float = 0.0
    fr: float = 0.0
    rr: float = 0.0

    def add(self, f: float, r: float) -> None:
        """Add a batch."""
        kept = KEPT if self.seen % FADE_BATCHES == 0 else 1.0
        self.batches = kept * (self.batches + 1.0)
        self.r = kept * (self.r + r)
        self.fr = kept * (self.fr + f * r)
        self.rr = kept * (self.rr + r * r)

    def per_row(self, overhead: float, expected: float) -> float:
        """v of this class for an overhead u; `expected` is the law's. At least 0."""
        own = (self.r - overhead * self.fr) / self.rr
        return max(0.0, (self.batches * own + LAW_BATCHES * expected) / (self.batches + LAW_BATCHES))


TERMS: Final = 4
"""Of the law: u, p, q and c."""


class SizeLaw(Struct):
    """u, p, q and c over all classes, with the sums that they follow from. None is negative, so that larger rows never
    take less.

    `unit` is the size in which q and c count: rows of this size take what the profile says, as long as no batch has
    taught otherwise. 0: unknown until the first batch, whose size it becomes.
    """

    unit: int = 0
    overhead: float = 1.0
    fixed: float = 0.0
    """p: the part of a row's time that does not depend on its size."""
    slope: float = 1.0
    """q, for rows of `unit`."""
    curve: float = 0.0
    """c, for rows of `unit`."""
    batches: float = 0.0
    products: list[float] = field(default_factory=lambda: [0.0] * TERMS * TERMS)
    """Of each two terms of a batch, f, r, r·size and r·size², summed over the batches."""
    sums: list[float] = field(default_factory=lambda: [0.0] * TERMS)

    def add(self, size: int, f: float, r: float) -> None:
        """Add a batch of rows of this size."""
        self.unit = self.unit or size
        relative = size / self.unit
        terms = (f, r, r * relative, r * relative * relative)
        self.sums = list(map(add, self.sums, terms))
        self.products = list(map(add, self.products, starmap(mul, product(terms, terms))))
        self.batches += 1.0

    def fade(self) -> None:
        """Let what was added so far count less."""
        self.products = [KEPT * each for each in self.products]
        self.sums = [KEPT * each for each in self.sums]
        self.batches *= KEPT

    def per_row(self, size: int) -> float:
        """p + q·size + c·size²."""
        relative = size / self.unit
        return self.fixed + relative * (self.slope + self.curve * relative)

    def fit(self) -> None:
        """Compute the terms from the batches so far. What they leave open, the profile decides: u = 1, q = 1."""
        matrix, target = [self.products[at : at + TERMS] for at in range(0, TERMS * TERMS, TERMS)], list(self.sums)
        for place, prior in enumerate((1.0, 0.0, 1.0, 0.0)):
            weight = PRIOR_BATCHES * matrix[place][place] / self.batches
            matrix[place][place] += weight
            target[place] += weight * prior
        self.overhead, self.fixed, self.slope, self.curve = least_squares(matrix, target)


class SizeLearning(Struct):
    """What finished batches of all classes have taught. `fits` is False if the profile knows sizes, so that only the
    shares of the classes are learnt here."""

    law: SizeLaw
    fits: bool
    seen: int = 0
    figures: dict[int, ClassFigures] = {}  # msgspec copies the empty dict for each
    """By class."""

    def add(self, size: int, rows: int, f: float, r: float) -> None:
        """A batch of `rows` of a class has finished. f and r as in `ClassFigures`."""
        own = self.figures.get(size)
        if own is None:
            self.figures[size] = own = ClassFigures()
        own.rows += rows
        own.seen += 1
        self.seen += 1
        is_due = self.seen % FADE_BATCHES == 0
        if is_due:
            for each in self.figures.values():
                each.rows *= SHARE_KEPT
        if self.fits:
            own.add(f, r)
            self.law.add(size, f, r)
            if is_due:
                self.law.fade()

    def miss(self, size: int, rows: int) -> None:
        """Rows of a class have come and were not served. Without them, the share of a class would fall because it is
        dropped, and plans would leave it without the cores that it needs."""
        self.figures.setdefault(size, ClassFigures()).rows += rows

    def lessons(self, taught: Mapping[int, tuple[float, float]]) -> SizeLessons:
        """What it says now. `taught` has the correction of each class, and how much the profile counts in it."""
        figures = {size: own for size, own in self.figures.items() if own.seen}
        law, rows = self.law, sum(each.rows for each in figures.values())
        if self.fits:
            law.fit()
        sure = {size: (1.0 - taught[size][1]) * own.rows for size, own in figures.items()}
        sum_sure = sum(sure.values())
        expected = sum(sure[size] * taught[size][0] for size in sure) / sum_sure if sum_sure else 1.0
        found = []
        for size, own in sorted(figures.items()):
            correction, prior_weight = taught[size]
            share, per_row = own.rows / rows, 0.0
            if self.fits:
                prior_weight, per_row = 0.0, own.per_row(law.overhead, law.per_row(size))
            elif prior_weight == 1.0:
                correction = expected
            found.append(ClassLesson(size, share, correction, prior_weight, per_row))
        if not self.fits:
            return SizeLessons(tuple(found), expected)
        return SizeLessons(tuple(found), expected, law.overhead, law.slope / law.unit, law.curve / law.unit**2)


def least_squares(matrix: Sequence[Sequence[float]], target: Sequence[float]) -> list[float]:
    """The x ≥ 0 for which xᵀ·matrix·x - 2·target·x is least; `matrix` is symmetric and positive definite.

    At the least, some components are 0, and the others solve the equations without these. There are few components, so
    every choice of those that are not 0 is tried.
    """
    count = len(target)
    best, least = [0.0] * count, 0.0
    for used in (chosen for size in range(1, count + 1) for chosen in combinations(range(count), size)):
        solved = _solved([[matrix[row][column] for column in used] for row in used], [target[row] for row in used])
        if min(solved) < 0.0:
            continue
        value = -sum(target[row] * each for row, each in zip(used, solved, strict=True))
        if value < least:
            least, best = value, [0.0] * count
            for row, each in zip(used, solved, strict=True):
                best[row] = each
    return best


def _solved(matrix: list[list[float]], target: list[float]) -> list[float]:
    """The solution of equations with a positive definite matrix, by elimination."""
    count = len(target)
    for pivot in range(count):
        for row in range(pivot + 1, count):
            factor = matrix[row][pivot] / matrix[pivot][pivot]
            target[row] -= factor * target[pivot]
            for column in range(pivot, count):
                matrix[row][column] -= factor * matrix[pivot][column]
    solved = [0.0] * count
    for row in reversed(range(count)):
        rest = sum(matrix[row][column] * solved[column] for column in range(row + 1, count))
        solved[row] = (target[row] - rest) / matrix[row][row]
    return solved
