"""Shared by all reproductions: trials, their parallel simulation, results by trial, and the finished reproduction.

A trial is an immutable description of a run; its result depends on nothing else, so that each trial is simulated once
per seed and results are looked up by trial. Each publication defines a subclass of `Trial` and, if it needs more than
violations and cores, of `RunResult`.
"""

import math
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from itertools import count, takewhile
from statistics import fmean
from typing import Any, Final, Generic, NamedTuple, Self, TypeVar

from msgspec import Struct, structs

from sloop import __version__
from sloop.api.models import capacity, hardware_name
from sloop.api.reports import Figure, Section, Series, Table, date_text, page
from sloop_systems.comparison.rows import COLUMNS, MEANINGS, Row, as_table, summary

Progress = Callable[[float, str], None]
"""Called with the finished share, 0 to 1, and the current step."""

THREADS: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Where libraries of linear algebra read their number of threads."""
PROCESSES_MAX: Final = 16
"""Limit of parallel processes: each holds a simulator and its log, so more would exceed a workstation's memory."""

Value = TypeVar("Value")
Product = TypeVar("Product")


class RunResult(Struct, frozen=True, kw_only=True):
    """The figures of one run."""

    violations: float
    """Late or dropped requests, in % of all requests."""
    cores: float
    """Mean of the allocated cores over the run."""
    violations_by_second: tuple[float, ...] = ()
    """Per second, late or dropped requests in % of the requests that arrived in it."""
    cores_by_second: tuple[float, ...] = ()


Result = TypeVar("Result", bound=RunResult)


class Trial(Struct, frozen=True, kw_only=True):
    """One run: the application, policy, load and world."""

    seed: int = 0
    data: str = ""
    """Path of the recorded data; empty for synthetic data."""

    def play(self) -> RunResult:
        """Simulate this trial."""
        raise NotImplementedError

    def label(self) -> str:
        """Its description in progress bars."""
        raise NotImplementedError

    def key(self) -> Self:
        """The trial without seed, data and labels that do not affect the result; equal keys are the same experiment."""
        return structs.replace(self, seed=0, data="")


AnyTrial = TypeVar("AnyTrial", bound=Trial)
Wanted = Sequence[tuple[AnyTrial, int]]
"""Trials, each with the number of seeds to simulate, from the trial's own seed on."""

UNSEEN: Final = 0xF1DBA8
"""The first of the seeds on which our own systems are compared with others: the first digits of the hash of the commit
that froze their parameters, so that nothing was chosen with them (docs/ours.md)."""


class Results(Generic[Result]):
    """Results by trial, one per simulated seed."""

    def __init__(self, played: Mapping[Any, Result]) -> None:
        self._by_trial: dict[Trial, dict[int, Result]] = {}
        for trial, result in played.items():
            self._by_trial.setdefault(trial.key(), {})[trial.seed] = result

    def of(self, trial: Trial, runs: int = 0) -> list[Result]:
        """The results of the first `runs` seeds from that of `trial` on (0: of all without a gap). The data of `trial`
        is ignored. KeyError without any."""
        found = self._by_trial[trial.key()]
        seeds = list(takewhile(found.__contains__, count(trial.seed)))[: runs or None]
        if not seeds:
            raise KeyError(trial)
        return [found[seed] for seed in seeds]

    def each(self, trial: Trial, field: str, runs: int = 0) -> list[float]:
        """One field of the result, for each seed."""
        return [float(getattr(result, field)) for result in self.of(trial, runs)]

    def mean(self, trial: Trial, field: str, runs: int = 0) -> float:
        """The mean of `each`."""
        return fmean(self.each(trial, field, runs))

    def violations(self, trial: Trial, runs: int = 0) -> list[float]:
        """Violations in percent, for each seed."""
        return self.each(trial, "violations", runs)

    def cores(self, trial: Trial, runs: int = 0) -> list[float]:
        """Mean cores, for each seed."""
        return self.each(trial, "cores", runs)


class Reproduction(Struct, frozen=True):
    """One publication, reproduced: rows with verdicts, figures, and what was assumed."""

    name: str
    source: str
    rows: tuple[Row, ...]
    figures: tuple[Figure, ...]
    assumed: tuple[str, ...]
    models: str
    """What is served in its experiments."""
    deadlines: str
    """Of requests in its experiments."""

    @property
    def summary(self) -> str:
        """The number of rows per verdict, as text."""
        return summary(self.rows)

    def tables(self) -> list[Table]:
        """One table for each experiment, in the order of the rows."""
        experiments = dict.fromkeys(row.experiment for row in self.rows)
        return [
            as_table([row for row in self.rows if row.experiment == name], name[0].upper() + name[1:])
            for name in experiments
        ]

    def page(self, *, made: datetime) -> str:
        """One self-contained HTML file, made at `made` on the machine that computed the results."""
        assumptions = Table(
            "Assumptions and sources that were not measured here", ("assumed",), tuple((a,) for a in self.assumed)
        )
        sections = [
            Section(title="Verdicts", text=(f"{self.summary}.", *MEANINGS, COLUMNS)),
            Section(title="Figures", figures=self.figures),
            *(Section(title=table.title, tables=(structs.replace(table, title=""),)) for table in self.tables()),
            Section(title="Where the numbers come from", tables=(assumptions,)),
        ]
        title = self.name.upper() if len(self.name) <= 3 else self.name.capitalize()  # FA2, IPA; Sponge
        facts = (
            ("date", date_text(made)),
            ("machine", f"{hardware_name()}, which simulates the published ones"),
            ("models", self.models),
            ("deadlines", self.deadlines),
            ("sloop", __version__),
        )
        return page(f"{title}, reproduced", sections, facts=facts, lead=self.source)


def silent(share: float, what: str) -> None:
    """A progress callback that does nothing."""


def run_trials(
    wanted: Wanted[AnyTrial], data: str = "", *, processes: int = 0, progress: Progress = silent
) -> Results[Any]:
    """Simulate every trial once per seed in parallel processes; duplicate trials are simulated once."""
    ready = list(
        dict.fromkeys(
            structs.replace(trial.key(), seed=trial.seed + place, data=data)
            for trial, seeds in wanted
            for place in range(seeds)
        )
    )
    results = in_parallel(_play, ready, processes=processes, progress=progress, what=_result_text)
    return Results(dict(zip(ready, results, strict=True)))


def _play(trial: AnyTrial) -> RunResult:
    return trial.play()


def _result_text(trial: Trial, result: RunResult) -> str:
    """The trial and its result, so that a run that is stopped has told what it found."""
    figures = f"{result.violations:.2f} % late or dropped, {result.cores:.1f} cores"
    return f"{trial.label()}, seed {trial.seed}: {figures}"


def in_parallel(
    run: Callable[[Value], Product],
    values: Sequence[Value],
    *,
    processes: int = 0,
    progress: Progress = silent,
    what: Callable[[Value, Product], str] = lambda value, _: str(value),
) -> list[Product]:
    """`[run(value) for value in values]`, in `processes` parallel processes (0: one per core; 1: in this process)."""
    processes = min(processes or default_processes(), len(values))
    products: list[Product] = []
    if processes <= 1:
        for place, value in enumerate(values):
            products.append(run(value))
            progress((place + 1) / len(values), what(value, products[-1]))
        return products
    # Fresh interpreters: forking a process that may have threads is not safe.
    context = multiprocessing.get_context("spawn")
    with _one_thread_each(), ProcessPoolExecutor(processes, mp_context=context) as pool:
        for place, product in enumerate(pool.map(run, values, chunksize=1)):
            products.append(product)
            progress((place + 1) / len(values), what(values[place], product))
    return products


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Processes that start meanwhile compute with one thread: there are as many of them as cores, and threads of NumPy
    and scikit-learn that share a core wait for each other, several times as long as they compute."""
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def default_processes() -> int:
    """The number of usable cores, at most `PROCESSES_MAX`."""
    return max(1, min(PROCESSES_MAX, int(capacity().cores)))


Measured = TypeVar("Measured")


class Equalised(NamedTuple, Generic[Measured]):
    """A run whose resources are those wanted, or the nearest that was found."""

    result: Measured
    runs: int
    is_equal: bool


RUNS_MAX: Final = 12
EQUAL_WITHIN: Final = 0.05


def equalised(
    run: Callable[[float], Measured],
    resources: Callable[[Measured], float],
    wanted: float,
    *,
    runs_max: int = RUNS_MAX,
    within: float = EQUAL_WITHIN,
) -> Equalised[Measured]:
    """Repeat a run with other values of a knob, from 1 on, until its resources are `wanted`, up to a fraction `within`.

    Resources should rise with the knob. As long as they are all above or all below what is wanted, the knob changes in
    proportion; then it is searched between the nearest values on both sides. After `runs_max` runs the nearest result
    counts (Flashpoint specification, section 2.17).
    """
    knob, low, high = 1.0, 0.0, math.inf
    best: Equalised[Measured] | None = None
    best_off = math.inf
    for runs in range(1, runs_max + 1):
        result = run(knob)
        ratio = resources(result) / wanted
        off = abs(ratio - 1.0)
        if off < best_off:
            best, best_off = Equalised(result, runs, off <= within), off
        if off <= within:
            break
        low, high = (max(low, knob), high) if ratio < 1.0 else (low, min(high, knob))
        if low and high < math.inf:
            knob = math.sqrt(low * high)
        else:
            knob *= min(4.0, max(0.25, 1.0 / ratio)) ** 1.2  # beyond the proportion, so that it ends up on both sides
    assert best is not None
    return best._replace(runs=runs)


def bars(name: str, samples: Sequence[Sequence[float]]) -> Series:
    """Means with their smallest and largest sample, at positions 0, 1, 2, …"""
    places = tuple(map(float, range(len(samples))))
    return Series(name, places, tuple(map(fmean, samples)), "bars", tuple(map(min, samples)), tuple(map(max, samples)))


def by_second(name: str, values: Sequence[float], *, steps: bool = False) -> Series:
    """One value for each second of a run."""
    return Series(name, tuple(map(float, range(len(values)))), tuple(map(float, values)), "steps" if steps else "line")
