"""How well forecasters foresee a trace: the policies themselves, shown what they would have seen, beside what came.

At each instant a forecaster sees the last ten minutes in buckets of a second, as the core shows them, and is held
against the busiest second of the horizon that follows, which is what IPA and Biscale provision for (IPA specification,
section 2.8). Symmetric error: mean of 200·|forecast − came| / (forecast + came). Knows policies and counts, no run.
"""

from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from msgspec import Struct, structs

from sloop.core.monitor import BUCKETS_KEPT
from sloop.core.protocols import Forecast
from sloop.core.views import Bucket, Traffic
from sloop.errors import InputError
from sloop.policies import POLICIES
from sloop.policies.build import build
from sloop.policies.forecast.lstm import SHIPPED, Lstm
from sloop.policies.forecast.oracle import Oracle
from sloop.report.figures import Figure, Kind, Panel, Series, thin
from sloop.report.tables import Table
from sloop.reproduce import twitter
from sloop.solvers.lstm import Epoch, Network, Training, train, untrained, windows
from sloop.streams import stream
from sloop.units import NS_PER_S, s
from sloop.workload import Trace

WARM_S: Final = 120
"""The first forecast is made after two minutes, when every forecaster has seen what it looks at."""

SHOWN_MAX: Final = 3
"""Lines in a plot that can still be told apart."""


class Score(Struct, frozen=True):
    """One forecaster on one trace; figures in per cent."""

    forecaster: str
    smape: float
    mape: float
    """Of the forecasts that something came after."""
    bias: float
    """Mean of (forecast − came) / came: above zero it costs, below it violates."""
    short: float
    """Share of forecasts below what came."""
    forecasts: int


class Foresight(Struct, frozen=True):
    """What was foreseen, and what came: one value for each instant."""

    name: str
    horizon_s: int
    at_s: list[int]
    came_rps: list[int]
    foreseen_rps: dict[str, list[float]]

    def scores(self) -> list[Score]:
        """Each forecaster's, in the order they were given."""
        return [_score(forecaster, values, self.came_rps) for forecaster, values in self.foreseen_rps.items()]

    def table(self) -> Table:
        """Scores, one forecaster a line."""
        return Table(
            f"{self.name}: the busiest second of the next {self.horizon_s} s, {len(self.at_s):,} times",
            ("forecaster", "SMAPE %", "MAPE %", "bias %", "too low, %"),
            tuple((row.forecaster, row.smape, row.mape, row.bias, row.short) for row in self.scores()),
        )

    def figure(self) -> Figure:
        """What came over time, and what those who came nearest had foreseen of it; the oracle would hide it."""
        at_s = [float(at) for at in self.at_s]
        nearest = sorted((row for row in self.scores() if row.forecaster != "oracle"), key=lambda row: row.smape)
        came = _over(at_s, "came", [float(value) for value in self.came_rps], "area")
        lines = [
            _over(at_s, f"{row.forecaster}, SMAPE {row.smape:.1f} %", self.foreseen_rps[row.forecaster], "steps")
            for row in nearest[:SHOWN_MAX]
        ]
        return Figure(
            name="forecasts",
            title=self.name,
            x_label="time, s",
            panels=(Panel(y_label=f"busiest of the next {self.horizon_s} s, requests/s", series=(came, *lines)),),
            alt=f"What came, and what was expected: {'; '.join(line.name for line in lines)}.",
        )


def forecaster(name: str, parameters: Mapping[str, object], counts: Sequence[int], *, horizon_s: int) -> Forecast:
    """The policy `name`; an oracle is told `counts`, the requests in each second, and looks `horizon_s` ahead unless
    `parameters` say otherwise. InputError where there is none."""
    if name == "oracle" and not parameters.keys() & {"horizon_ms", "horizon_s"}:
        parameters = {**parameters, "horizon_s": horizon_s}
    found = build("forecast", name, parameters)
    if isinstance(found, Oracle) and not found.counts:
        return replace(found, counts=tuple(map(float, counts)))
    return found  # type: ignore[return-value]  # it is of the verb asked for


def every_forecaster(counts: Sequence[int], *, horizon_s: int) -> dict[str, Forecast]:
    """All there are with their own parameters, and the network with all weights that ship."""
    found = {name: forecaster(name, {}, counts, horizon_s=horizon_s) for name in POLICIES["forecast"] if name != "lstm"}
    return found | {f"lstm {weights}": Lstm(weights=weights) for weights in SHIPPED}


def foresee(
    name: str,
    forecasters: Mapping[str, Forecast],
    counts: Sequence[int],
    *,
    horizon_s: int,
    every_s: int,
    advance: Callable[[float], None],
) -> Foresight:
    """Ask each forecaster every `every_s` seconds of a trace of `counts` per second, and note what came.

    `advance` is told the share done. InputError for a trace that is shorter than the first forecast and its horizon.
    """
    if len(counts) < WARM_S + horizon_s:
        raise InputError(
            f"{name} is {len(counts)} s long", help=f"give at least {WARM_S + horizon_s} s: two minutes and the horizon"
        )
    instants = range(WARM_S, len(counts) - horizon_s + 1, every_s)
    found = Foresight(name, horizon_s, list(instants), [], {each: [] for each in forecasters})
    seen: deque[Bucket] = deque(maxlen=BUCKETS_KEPT)
    told = 0
    for place, at_s in enumerate(instants):
        seen.extend(Bucket(s(second), arrivals=counts[second]) for second in range(told, at_s))
        told = at_s
        door = Traffic(buckets=tuple(seen), bucket_ns=NS_PER_S)
        for each, policy in forecasters.items():
            found.foreseen_rps[each].append(policy.demand_rps(s(at_s), door))
        found.came_rps.append(max(counts[at_s : at_s + horizon_s]))
        if place % 100 == 0:
            advance(place / len(instants))
    return found


class Lesson(Struct, frozen=True):
    """Requests in each second to train on, and others to be tested on, which come later."""

    name: str
    provenance: str
    before: "array[int]"
    after: "array[int]"

    def part(self, start_s: int, duration_s: int | None) -> "Lesson":
        """The same, tested only on `duration_s` seconds from `start_s` of what it is tested on."""
        if not start_s and duration_s is None:
            return self
        end_s = len(self.after) if duration_s is None else min(len(self.after), start_s + duration_s)
        return structs.replace(self, name=f"{self.name}, {start_s}–{end_s} s", after=self.after[start_s:end_s])

    def without_silence(self) -> "Lesson":
        """Without seconds of no request, which in the Twitter trace are gaps in the record (IPA specification, 2.8)."""
        before, after = (array("q", filter(None, counts)) for counts in (self.before, self.after))
        return structs.replace(self, before=before, after=after)


def fortnight(data: Path | None, *, seed: int = 0) -> Lesson:
    """Days 0 to 14 of the Twitter trace to train on and days 14 to 21 to be tested on, or days made up after it.

    `data` is the folder of public data."""
    before, after = twitter.training(data, seed=seed), twitter.held_out(data, seed=seed)
    return Lesson("Twitter, days 14 to 21", after.provenance, before.counts, after.counts)


def two_thirds(trace: Trace) -> Lesson:
    """Train on the first two thirds of a trace, be tested on the rest."""
    counts = trace.counts_per_s()
    cut = len(counts) * 2 // 3
    return Lesson(trace.name, trace.provenance, counts[:cut], counts[cut:])


def all_of(trace: Trace) -> Lesson:
    """Be tested on the whole of a trace, with nothing to train on."""
    return Lesson(trace.name, trace.provenance, array("q"), trace.counts_per_s())


def learned(
    counts: Sequence[int],
    shape: tuple[int, int, int],
    *,
    seed: int,
    how: Training,
    say: Callable[[Epoch], None],
) -> Network:
    """A network for `shape` (bins, seconds of each, horizon in seconds), trained on a trace of `counts` per second.

    The same seed gives the same weights. InputError for a trace too short to train on.
    """
    bins, bin_s, horizon_s = shape
    peaks, ahead = windows(counts, bins=bins, bin_s=bin_s, horizon_s=horizon_s, stride_s=bin_s)
    draw = stream(seed, "forecast/train").random
    return train(untrained(bins, bin_s, horizon_s, how.units, draw), peaks, ahead, how, say, draw)


def _score(name: str, foreseen: Sequence[float], came: Sequence[int]) -> Score:
    pairs = list(zip(foreseen, came, strict=True))
    apart = [200 * abs(ours - theirs) / (ours + theirs) if ours + theirs else 0.0 for ours, theirs in pairs]
    relative = [100 * (ours - theirs) / theirs for ours, theirs in pairs if theirs]
    return Score(
        forecaster=name,
        smape=_mean(apart),
        mape=_mean([abs(error) for error in relative]),
        bias=_mean(relative),
        short=_mean([100.0 * (ours < theirs) for ours, theirs in pairs]),
        forecasts=len(pairs),
    )


def _over(at_s: Sequence[float], name: str, values: Sequence[float], kind: Kind) -> Series:
    x, y = thin(at_s, values)
    return Series(name, tuple(x), tuple(y), kind)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
