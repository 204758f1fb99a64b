"""Accuracy of forecasters on a trace, and training of a network: `python -m benchmarks.forecasts --help`.

At each instant, a forecast policy gets the last ten minutes in buckets of a second, as from the core. Its answer is
compared with the busiest second of the following horizon, which IPA and Biscale provision for (IPA specification,
section 2.8). SMAPE is the mean of 200·|forecast − actual| divided by (forecast + actual).

This is an experiment and not part of the wheel; the network that it writes is a parameter in an application file.
"""

from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import click
from msgspec import Struct, structs
from rich.console import RenderableType

from benchmarks.lstm_training import LstmTraining, TrainingEpoch, train, untrained, windows
from sloop.cli.command import TRACE_HELP, CommandOutput, command, mapping, progress, table, trace_at
from sloop.core.monitor import BUCKETS_KEPT
from sloop.core.protocols import Forecast
from sloop.core.views import Bucket, Traffic
from sloop.errors import InputError, MachineError
from sloop.policies.forecast import OracleForecast
from sloop.report.plots import Figure, Kind, Panel, Series, thin
from sloop.report.svg import write_figure
from sloop.report.tables import Table
from sloop.streams import stream
from sloop.systems.registry import POLICIES, build
from sloop.units import NS_PER_S, s
from sloop.workload import Trace
from sloop_systems.comparison import data_folder, twitter
from sloop_systems.ipa.lstm import SHIPPED, Lstm, LstmNetwork

WARM_S: Final = 120
"""The first forecast is made after two minutes, when every forecaster has seen as much as it looks at."""
LINES_MAX: Final = 3
"""The most forecasters that can be distinguished in a plot."""
SHAPES: Final = {"ipa": (12, 10, 20), "biscale": (6, 10, 10)}
"""Bins a network looks at, seconds of each, seconds ahead."""
FORECASTS: Final = 5_000
"""Enough for two digits of a mean error."""
NAMES: Final = "--forecaster"
LINE_CHARS: Final = 100

EXAMPLE = """
python -m benchmarks.forecasts
python -m benchmarks.forecasts requests.txt --forecaster last --forecaster '{name: ewma, half_life_s: 3}' --plot x.svg
python -m benchmarks.forecasts requests.txt --train mine.yaml
"""
NOTES = f"""{TRACE_HELP} Without TRACE: days 14 to 21 of the Twitter trace without its silent seconds, or days that are
made up if the trace is not there. With --train, a TRACE is split: the first two thirds train the network, the rest is
scored; the Twitter trace trains on days 0 to 14. FILE.yaml is written as the policy stands in an application file, any
other FILE holds the bare text."""


class Score(Struct, frozen=True):
    """One forecaster on one trace, in percent."""

    forecaster: str
    smape: float
    mape: float
    """Over the forecasts that were followed by at least one request."""
    bias: float
    """Mean of (forecast − actual) / actual: above zero it costs replicas, below zero it violates deadlines."""
    short: float
    """Share of forecasts below the actual rate."""
    forecasts: int


class Comparison(Struct, frozen=True):
    """Forecasts and actual rates, one value per instant."""

    name: str
    horizon_s: int
    at_s: list[int]
    actual_rps: list[int]
    forecast_rps: dict[str, list[float]]

    def scores(self) -> list[Score]:
        """The score of each forecaster, in the order of `forecasts`."""
        return [_score(forecaster, values, self.actual_rps) for forecaster, values in self.forecast_rps.items()]

    def table(self) -> Table:
        """A table of the scores, one row per forecaster."""
        return Table(
            f"{self.name}: the busiest second of the next {self.horizon_s} s, {len(self.at_s):,} times",
            ("forecaster", "SMAPE %", "MAPE %", "bias %", "too low, %"),
            tuple((row.forecaster, row.smape, row.mape, row.bias, row.short) for row in self.scores()),
        )

    def figure(self) -> Figure:
        """A plot of the actual rate and the best forecasters; without the oracle, which would cover the actual rate."""
        at_s = [float(at) for at in self.at_s]
        closest = sorted((row for row in self.scores() if row.forecaster != "oracle"), key=lambda row: row.smape)
        actual = _over_time(at_s, "actual", [float(value) for value in self.actual_rps], "area")
        lines = [
            _over_time(at_s, f"{row.forecaster}, SMAPE {row.smape:.1f} %", self.forecast_rps[row.forecaster], "steps")
            for row in closest[:LINES_MAX]
        ]
        return Figure(
            name="forecasts",
            title=self.name,
            x_label="time, s",
            panels=(Panel(y_label=f"busiest of the next {self.horizon_s} s, requests/s", series=(actual, *lines)),),
            alt=f"The actual rate, and what was forecast: {'; '.join(line.name for line in lines)}.",
        )


def forecaster(name: str, parameters: Mapping[str, object], counts: Sequence[int], *, horizon_s: int) -> Forecast:
    """The policy `name`; an oracle is given `counts`, the requests in each second, and looks `horizon_s` ahead unless
    `parameters` say otherwise. InputError for an unknown name."""
    if name == "oracle" and not parameters.keys() & {"horizon_ms", "horizon_s"}:
        parameters = {**parameters, "horizon_s": horizon_s}
    found = build("forecast", name, parameters)
    if isinstance(found, OracleForecast) and not found.counts:
        return replace(found, counts=tuple(map(float, counts)))
    return found  # type: ignore[return-value]  # policies of this verb are forecasters


def every_forecaster(counts: Sequence[int], *, horizon_s: int) -> dict[str, Forecast]:
    """All of them with their default parameters, and the network with all weights that ship."""
    found = {name: forecaster(name, {}, counts, horizon_s=horizon_s) for name in POLICIES["forecast"] if name != "lstm"}
    return found | {f"lstm {weights}": Lstm(weights=weights) for weights in SHIPPED}


def compare(
    name: str,
    forecasters: Mapping[str, Forecast],
    counts: Sequence[int],
    *,
    horizon_s: int,
    every_s: int,
    advance: Callable[[float], None],
) -> Comparison:
    """Ask each forecaster every `every_s` seconds of a trace of `counts` per second, and note the actual rate.

    `advance` gets the share done. InputError for a trace that is shorter than the first forecast and its horizon.
    """
    if len(counts) < WARM_S + horizon_s:
        raise InputError(
            f"{name} is {len(counts)} s long", help=f"give at least {WARM_S + horizon_s} s: two minutes and the horizon"
        )
    instants = range(WARM_S, len(counts) - horizon_s + 1, every_s)
    found = Comparison(name, horizon_s, list(instants), [], {each: [] for each in forecasters})
    recent: deque[Bucket] = deque(maxlen=BUCKETS_KEPT)
    closed_s = 0
    for place, at_s in enumerate(instants):
        recent.extend(Bucket(s(second), arrivals=counts[second]) for second in range(closed_s, at_s))
        closed_s = at_s
        ingress = Traffic(buckets=tuple(recent), bucket_ns=NS_PER_S)
        for each, policy in forecasters.items():
            found.forecast_rps[each].append(policy.demand_rps(s(at_s), ingress))
        found.actual_rps.append(max(counts[at_s : at_s + horizon_s]))
        if place % 100 == 0:
            advance(place / len(instants))
    return found


class Split(Struct, frozen=True):
    """Requests in each second to train on, and later ones to test on."""

    name: str
    provenance: str
    before: "array[int]"
    after: "array[int]"

    def part(self, start_s: int, duration_s: int | None) -> "Split":
        """The same, with only `duration_s` seconds from `start_s` of the test."""
        if not start_s and duration_s is None:
            return self
        end_s = len(self.after) if duration_s is None else min(len(self.after), start_s + duration_s)
        return structs.replace(self, name=f"{self.name}, {start_s}–{end_s} s", after=self.after[start_s:end_s])

    def without_silence(self) -> "Split":
        """Without the seconds that have no request: in the Twitter trace, nothing was recorded then (IPA specification,
        2.8)."""
        before, after = (array("q", filter(None, counts)) for counts in (self.before, self.after))
        return structs.replace(self, before=before, after=after)


def fortnight(data: Path | None, *, seed: int = 0) -> Split:
    """Days 0 to 14 of the Twitter trace to train on and days 14 to 21 to test on, or synthetic days like them.

    `data` is the folder of public data."""
    before, after = twitter.training(data, seed=seed), twitter.held_out(data, seed=seed)
    return Split("Twitter, days 14 to 21", after.provenance, before.counts, after.counts)


def two_thirds(trace: Trace) -> Split:
    """Train on the first two thirds of a trace, test on the rest."""
    counts = trace.counts_per_s()
    cut = len(counts) * 2 // 3
    return Split(trace.name, trace.provenance, counts[:cut], counts[cut:])


def all_of(trace: Trace) -> Split:
    """Test on the whole of a trace, with nothing to train on."""
    return Split(trace.name, trace.provenance, array("q"), trace.counts_per_s())


def trained(
    counts: Sequence[int],
    shape: tuple[int, int, int],
    *,
    seed: int,
    how: LstmTraining,
    report: Callable[[TrainingEpoch], None],
) -> LstmNetwork:
    """A network for `shape` (bins, seconds of each, horizon in seconds), trained on a trace of `counts` per second.

    The same seed gives the same weights. InputError for a trace too short to train on.
    """
    bins, bin_s, horizon_s = shape
    peaks, ahead = windows(counts, bins=bins, bin_s=bin_s, horizon_s=horizon_s, stride_s=bin_s)
    draw = stream(seed, "forecast/train").random
    return train(untrained(bins, bin_s, horizon_s, how.units, draw), peaks, ahead, how, report, draw)


def _score(name: str, forecasts: Sequence[float], actual: Sequence[int]) -> Score:
    pairs = list(zip(forecasts, actual, strict=True))
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


def _over_time(at_s: Sequence[float], name: str, values: Sequence[float], kind: Kind) -> Series:
    x, y = thin(at_s, values)
    return Series(name, tuple(x), tuple(y), kind)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


@command("forecasts", example=EXAMPLE, notes=NOTES)
@click.argument("trace", metavar="[TRACE]", required=False)
@click.option(
    NAMES, "names", multiple=True, metavar="NAME", help="A policy, or a mapping of one; may be repeated [all]."
)
@click.option("--horizon-s", type=click.IntRange(min=1), help="Forecast the busiest second of this long [20].")
@click.option("--every-s", type=click.IntRange(min=1), help="Ask this often [10; in long traces some 5,000 times].")
@click.option("--start-s", type=click.IntRange(min=0), default=0, help="Score from here on.")
@click.option("--duration-s", type=click.IntRange(min=1), help="Score only this long.")
@click.option("--train", "into", type=click.Path(dir_okay=False, path_type=Path), help="Train a network, into FILE.")
@click.option(
    "--shape", type=click.Choice(list(SHAPES)), default="ipa", show_default=True, help="Whose network to train."
)
@click.option(
    "--epochs", type=click.IntRange(min=1), default=LstmTraining().epochs, show_default=True, help="Training epochs."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of all random numbers.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw forecasts and actual rate into this file (.svg).")
def forecast(  # noqa: PLR0913, PLR0917  # one parameter per option
    trace: str | None,
    names: Sequence[str],
    horizon_s: int | None,
    every_s: int | None,
    start_s: int,
    duration_s: int | None,
    into: Path | None,
    shape: str,
    epochs: int,
    seed: int,
    plot: Path | None,
) -> CommandOutput:
    """Score forecasters on a trace: the forecast of each for the coming seconds, compared with the actual rate."""
    split = _split(trace, seed=seed, training=into is not None).part(start_s, duration_s)
    if trace is None:
        split = split.without_silence()
    counts, ahead_s = split.after, horizon_s or SHAPES[shape][2]
    every_s = every_s or max(10, len(counts) // FORECASTS)
    chosen = _chosen(names, counts, ahead_s)
    finished: list[TrainingEpoch] = []
    if into is not None:
        network = _network(split, SHAPES[shape], LstmTraining(epochs=epochs), seed, finished)
        _write(network, into)
        chosen[f"lstm {into.name}"] = Lstm(weights=network.encoded())
    with progress("forecasting", total=1.0) as advance:
        found = compare(split.name, chosen, counts, horizon_s=ahead_s, every_s=every_s, advance=advance)
    if plot:
        write_figure(found.figure(), plot)
    value = {"trace": split.name, "provenance": split.provenance, "seconds": len(counts), "horizon_s": ahead_s}
    output: list[RenderableType] = [table(_epochs(finished))] if finished else []
    output += [table(found.table()), split.provenance]
    return CommandOutput(value | {"every_s": every_s, "scores": found.scores(), "training": finished}, output)


def _split(trace: str | None, *, seed: int, training: bool) -> Split:
    if trace is None:
        return fortnight(data_folder(), seed=seed)
    found = trace_at(trace, seed=seed, duration_s=None)
    return two_thirds(found) if training else all_of(found)


def _chosen(names: Sequence[str], counts: Sequence[int], horizon_s: int) -> dict[str, Forecast]:
    """The requested forecasters, each under the text with which it was requested."""
    if not names:
        return every_forecaster(counts, horizon_s=horizon_s)
    chosen = {}
    for text in names:
        parameters = mapping(text, NAMES) if text.lstrip().startswith("{") else {"name": text}
        name = str(parameters.pop("name", ""))
        chosen[text] = forecaster(name, parameters, counts, horizon_s=horizon_s)
    return chosen


def _network(
    split: Split, shape: tuple[int, int, int], how: LstmTraining, seed: int, finished: list[TrainingEpoch]
) -> LstmNetwork:
    with progress("training", total=how.epochs) as advance:

        def report(epoch: TrainingEpoch) -> None:
            finished.append(epoch)
            advance(epoch.number, f"error {100 * epoch.held_back:.2f} %")

        return trained(split.before, shape, seed=seed, how=how, report=report)


def _write(network: LstmNetwork, into: Path) -> None:
    """Write the weights, as text or as a policy for `system:` in an application file."""
    text = network.encoded()
    lines = [text[at : at + LINE_CHARS] for at in range(0, len(text), LINE_CHARS)]
    if into.suffix in {".yaml", ".yml"}:
        lines = ["forecast:", "  name: lstm", "  weights: >-", *(f"    {line}" for line in lines)]
    try:
        into.write_text("\n".join(lines) + "\n", encoding="ascii")
    except OSError as error:
        help_text = "name a file in a folder that may be written"
        raise MachineError(f"{into} cannot be written: {error.strerror}", help=help_text) from error


def _epochs(finished: Sequence[TrainingEpoch]) -> Table:
    rows = tuple((epoch.number, 100 * epoch.trained, 100 * epoch.held_back, epoch.best) for epoch in finished)
    return Table("Training", ("epoch", "error %", "validation error %", "best so far"), rows)


if __name__ == "__main__":
    forecast()
