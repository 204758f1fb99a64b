"""How the size of rows changes the duration of a batch, learnt from finished batches where the profile does not say.

A batch of n rows is modelled to take u·F + v·R(n). F and R divide the duration that the profile has for n rows: F is
the overhead, which does not depend on the rows, and R(n) is the rest. The factor u on the overhead is the same for all
sizes. The factor v on the rest is one number for each class of sizes. It is expected to be near the *law*
p + q·size + c·size²: a transformer takes time that is linear in the length, and its attention time that is quadratic.

The fit minimises the squares of relative errors, so that a batch that a pause made ten times as long weighs a
hundredth. It is deterministic: the same batches in the same order give the same numbers.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import combinations, product, starmap
from operator import add, attrgetter, mul
from typing import Final

from msgspec import Struct, field

FADE_BATCHES: Final = 64
"""After every so many batches, earlier batches lose weight: after as many of a class in its v, after as many of any
class in the law."""
KEPT: Final = 0.5
"""The part of its weight that a batch then keeps."""
SHARE_KEPT: Final = 0.97
"""The same for the shares of classes. It is closer to 1, so that shares are averages over some 2,000 batches: they are
noisy, and each change of them changes the mean estimate, with which plans are made."""
PRIOR_BATCHES: Final = 0.003
"""The weight of the profile in the fit of the law, in batches: enough to decide what no batch decides, and little
beside the first batch."""
LAW_BATCHES: Final = 0.5
"""The weight of the law in the v of a class, in batches of this class."""


class ClassLesson(Struct, frozen=True, array_like=True, gc=False):
    """What was learnt about one class of sizes, as policies see it."""

    size: int
    """The largest size of the class."""
    share: float
    """The fraction of the rows that are of this class."""
    correction: float
    """The factor on the expected durations of its batches (`SizeEstimate.expected_ns`)."""
    prior_weight: float
    """How much of `correction` is still the 1 of the profile, 0 to 1."""
    per_row: float
    """v of the largest rows of the class; not used if the profile knows sizes."""


_SIZE_OF = attrgetter("size")


class SizeLessons(Struct, frozen=True, array_like=True):
    """What was learnt about all classes that had a batch, as policies see it."""

    classes: tuple[ClassLesson, ...] = ()
    """By ascending size."""
    expected: float = 1.0
    """The correction of classes that had no batch, or too few: the mean of the others, weighted by their rows and by
    what their own corrections have of finished batches."""
    overhead: float = 1.0
    """u."""
    slope: float = 0.0
    """q of the law."""
    curve: float = 0.0
    """c of the law."""

    def of(self, size: int) -> ClassLesson | None:
        """The lesson about this class; None if it had no batch."""
        at = bisect_left(self.classes, size, key=_SIZE_OF)
        return self.classes[at] if at < len(self.classes) and self.classes[at].size == size else None

    def around(self, size: int) -> tuple[int, int]:
        """The sizes of the next classes below and above this one that had a batch; 0 for none."""
        below, above = (bisect_left(self.classes, each, key=_SIZE_OF) for each in (size, size + 1))
        return (
            self.classes[below - 1].size if below else 0,
            self.classes[above].size if above < len(self.classes) else 0,
        )

    def per_row(self, size: int, unit: int) -> float:
        """v of a class. If the class had no batch: that of the next larger class that had one (otherwise of the
        largest), plus the difference that the law has between the two. Before the first batch of any class, v is in
        proportion to the size if the profile is known to be for rows of size `unit`, and 1 if that is not known (0)."""
        if not self.classes:
            return size / unit if unit else 1.0
        at = bisect_left(self.classes, size, key=_SIZE_OF)
        near = self.classes[min(at, len(self.classes) - 1)]
        return max(0.0, near.per_row + (size - near.size) * (self.slope + self.curve * (size + near.size)))


NO_LESSONS: Final = SizeLessons()


class ClassFigures(Struct):
    """Sums over the batches of one class, from which its v and its share follow.

    With t the measured duration of a batch, f = F/t and r = R(n)/t. The sums are of r, f·r and r².
    """

    rows: float = 0.0
    """How many rows came; earlier ones weigh less (`SHARE_KEPT`)."""
    seen: int = 0
    """How many batches there were."""
    batches: float = 0.0
    """The sum of their weights."""
    r: float = 0.0
    fr: float = 0.0
    rr: float = 0.0
    rr_size: float = 0.0
    """The sum of r²·size, where size is that of the largest row of a batch."""

    def add(self, f: float, r: float, size: int) -> None:
        """Add a batch whose largest row has this size."""
        kept = KEPT if self.seen % FADE_BATCHES == 0 else 1.0
        self.batches = kept * (self.batches + 1.0)
        self.r = kept * (self.r + r)
        self.fr = kept * (self.fr + f * r)
        self.rr = kept * (self.rr + r * r)
        self.rr_size = kept * (self.rr_size + r * r * size)

    def per_row(self, size: int, law: "SizeLaw") -> float:
        """v of the largest rows of this class, whose size is given, at least 0. Its batches say what v is on average,
        of the sizes that their largest rows had; the law says how much more the largest rows of the class take."""
        own = (self.r - law.overhead * self.fr) / self.rr + law.per_row(size) - law.per_row(self.rr_size / self.rr)
        return max(0.0, (self.batches * own + LAW_BATCHES * law.per_row(size)) / (self.batches + LAW_BATCHES))


TERMS: Final = 4
"""The number of terms that are fitted together: u, p, q and c."""


class SizeLaw(Struct):
    """u, p, q and c over all classes, with the sums from which they follow. None of the four is negative, so that
    larger rows never take less.

    Sizes are divided by `unit` here. It is the size of the rows for which the profile was measured: until batches
    teach otherwise, v is 1 at this size. 0: not known; then it becomes the size of the first batch.
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
    """The products of each two of the terms f, r, r·size and r·size² of a batch, summed over the batches: a symmetric
    matrix, row by row."""
    sums: list[float] = field(default_factory=lambda: [0.0] * TERMS)
    """These terms, summed over the batches."""

    def add(self, size: int, f: float, r: float) -> None:
        """Add a batch of rows of this size."""
        self.unit = self.unit or size
        relative = size / self.unit
        terms = (f, r, r * relative, r * relative * relative)
        self.sums = list(map(add, self.sums, terms))
        self.products = list(map(add, self.products, starmap(mul, product(terms, terms))))
        self.batches += 1.0

    def fade(self) -> None:
        """Reduce the weight of all batches so far."""
        self.products = [KEPT * each for each in self.products]
        self.sums = [KEPT * each for each in self.sums]
        self.batches *= KEPT

    def per_row(self, size: float) -> float:
        """p + q·size + c·size²."""
        relative = size / self.unit
        return self.fixed + relative * (self.slope + self.curve * relative)

    def fit(self) -> None:
        """Compute u, p, q and c from the batches so far. Where the batches do not decide, the profile does: u and q are
        pulled towards 1, p and c towards 0, with the weight `PRIOR_BATCHES`."""
        matrix, target = [self.products[at : at + TERMS] for at in range(0, TERMS * TERMS, TERMS)], list(self.sums)
        for place, prior in enumerate((1.0, 0.0, 1.0, 0.0)):
            weight = PRIOR_BATCHES * matrix[place][place] / self.batches
            matrix[place][place] += weight
            target[place] += weight * prior
        self.overhead, self.fixed, self.slope, self.curve = least_squares(matrix, target)


class SizeLearning(Struct):
    """What finished batches of all classes have taught. If the profile knows sizes, `fits` is False: then only the
    shares of the classes are learnt here, beside the corrections that `SizeEstimate` learns."""

    law: SizeLaw
    fits: bool
    seen: int = 0
    figures: dict[int, ClassFigures] = {}  # msgspec copies the empty dict for each
    """By the largest size of a class."""

    def add(self, size: int, rows: int, f: float, r: float, largest: int) -> None:
        """A batch of `rows` of a class has finished, of which the largest has the size `largest`. f and r as in
        `ClassFigures`."""
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
            own.add(f, r, largest)
            self.law.add(largest, f, r)
            if is_due:
                self.law.fade()

    def miss(self, size: int, rows: int) -> None:
        """Rows of a class were dropped. They count in its share: otherwise the share would fall because rows are
        dropped, and plans would give the class even fewer cores."""
        self.figures.setdefault(size, ClassFigures()).rows += rows

    def lessons(self, taught: Mapping[int, tuple[float, float]], spread: float = 1.0) -> SizeLessons:
        """What was learnt so far. `taught` has for each class its correction and the `prior_weight` of it. `spread` is
        the correction while no class has one of its own: by how much the P99 of batches is above their mean."""
        figures = {size: own for size, own in self.figures.items() if own.seen}
        law, rows = self.law, sum(each.rows for each in figures.values())
        if self.fits:
            law.fit()
        sure = {size: (1.0 - taught[size][1]) * own.rows for size, own in figures.items()}
        sum_sure = sum(sure.values())
        expected = sum(sure[size] * taught[size][0] for size in sure) / sum_sure if sum_sure else spread
        ascending, per_rows = sorted(figures.items()), dict.fromkeys(figures, 0.0)
        if self.fits:
            own_per_rows = [own.per_row(size, law) for size, own in ascending]
            risen = never_falling(own_per_rows, [own.rr for _, own in ascending])
            per_rows = dict(zip(dict(ascending), risen, strict=True))
        found = []
        for size, own in ascending:
            correction, prior_weight = taught[size]
            if prior_weight == 1.0:
                correction = expected
            if self.fits:
                prior_weight = 0.0
            found.append(ClassLesson(size, own.rows / rows, correction, prior_weight, per_rows[size]))
        if not self.fits:
            return SizeLessons(tuple(found), expected)
        return SizeLessons(tuple(found), expected, law.overhead, law.slope / law.unit, law.curve / law.unit**2)


def never_falling(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The numbers nearest to these `values`, by weighted least squares, of which none is less than the one before.
    Where values fall, their mean takes their place (pool adjacent violators; Ayer et al., Ann. Math. Stat. 26, 1955).

    Large rows take no less time than small ones. So if a pause made the only batch of small rows as long as a hundred
    of larger ones, those are right about both; weights are those of the fit, where such a batch hardly counts.
    """
    pools: list[tuple[float, float, int]] = []  # the mean, the weight and the number of the values in it
    for own, own_weight in zip(values, weights, strict=True):
        mean, weight, count = own, own_weight, 1
        while pools and pools[-1][0] > mean:
            before, heavy, others = pools.pop()
            mean = (before * heavy + mean * weight) / (heavy + weight)
            weight, count = heavy + weight, others + count
        pools.append((mean, weight, count))
    return [mean for mean, _, count in pools for _ in range(count)]


def least_squares(matrix: Sequence[Sequence[float]], target: Sequence[float]) -> list[float]:
    """Non-negative least squares: the x ≥ 0 that minimises xᵀ·matrix·x - 2·target·x. `matrix` is symmetric and positive
    definite.

    At the minimum some components are 0, and the others solve the linear equations that remain without these. There
    are few components, so every set of components that may differ from 0 is tried.
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
    """The solution of linear equations with a positive definite matrix, by Gaussian elimination. Both arguments are
    overwritten."""
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
