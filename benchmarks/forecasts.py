"""How well forecasters predict a trace, and training of a network on one: `python -m benchmarks.forecasts --help`.

An experiment, not part of the wheel: the network it writes is a parameter of an application file.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click
from rich.console import RenderableType

from sloop.cli.command import TRACE_HELP, CommandOutput, command, mapping, progress, table, trace_at
from sloop.core.protocols import Forecast
from sloop.errors import MachineError
from sloop.policies.forecast import Lstm
from sloop.report.arrivals import draw
from sloop.report.tables import Table
from sloop.reproduce import data_folder
from sloop.reproduce.forecasts import (
    Lesson,
    all_of,
    every_forecaster,
    forecaster,
    foresee,
    fortnight,
    learned,
    two_thirds,
)
from sloop.solvers.forecasting import LstmNetwork, LstmTraining, TrainingEpoch

EXAMPLE = """
python -m benchmarks.forecasts
python -m benchmarks.forecasts requests.txt --forecaster last --forecaster '{name: holt, trend: 0.3}' --plot forecasts.png
python -m benchmarks.forecasts requests.txt --train mine.yaml
"""

MORE = f"""{TRACE_HELP} Without TRACE: days 14 to 21 of the Twitter trace, its silent seconds left out; days that are made up
where the trace is not there. With --train: a TRACE is trained on up to two thirds and scored after that, the Twitter
trace trained on days 0 to 14; FILE.yaml is written as it stands in an application file, any other FILE as bare text."""

SHAPES: Final = {"ipa": (12, 10, 20), "biscale": (6, 10, 10)}
"""Bins a network looks at, seconds of each, seconds ahead."""

NAMES = "--forecaster"
LINE = 100
FORECASTS: Final = 5_000
"""Enough for two digits of a mean error."""


@command("forecasts", example=EXAMPLE, notes=MORE)
@click.argument("trace", metavar="[TRACE]", required=False)
@click.option(
    NAMES, "names", multiple=True, metavar="NAME", help="A policy, or a mapping of one; may be repeated [all]."
)
@click.option("--horizon-s", type=click.IntRange(min=1), help="Foresee the busiest second of this long [20].")
@click.option("--every-s", type=click.IntRange(min=1), help="Ask this often [10; in long traces some 5,000 times].")
@click.option("--start-s", type=click.IntRange(min=0), default=0, help="Score from here on.")
@click.option("--duration-s", type=click.IntRange(min=1), help="Score only so long.")
@click.option("--train", "into", type=click.Path(dir_okay=False, path_type=Path), help="Train a network, into FILE.")
@click.option(
    "--shape", type=click.Choice(list(SHAPES)), default="ipa", show_default=True, help="Whose network to train."
)
@click.option(
    "--epochs", type=click.IntRange(min=1), default=LstmTraining().epochs, show_default=True, help="Of training."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of what is drawn at random.")
@click.option(
    "--plot", type=click.Path(path_type=Path), help="Draw forecasts and what came into this file (.png, .svg)."
)
def forecast(
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
    """Score forecasters on a trace: what each expected of the seconds to come, and what came."""
    lesson = _lesson(trace, seed=seed, trained=into is not None).part(start_s, duration_s)
    if trace is None:
        lesson = lesson.without_silence()
    counts, ahead_s = lesson.after, horizon_s or SHAPES[shape][2]
    every_s = every_s or max(10, len(counts) // FORECASTS)
    chosen = _chosen(names, counts, ahead_s)
    told: list[TrainingEpoch] = []
    if into is not None:
        network = _trained(lesson, SHAPES[shape], LstmTraining(epochs=epochs), seed, told)
        _write(network, into)
        chosen[f"lstm {into.name}"] = Lstm(weights=network.encoded())
    with progress("forecasting", total=1.0) as advance:
        found = foresee(lesson.name, chosen, counts, horizon_s=ahead_s, every_s=every_s, advance=advance)
    if plot:
        draw(found.figure(), plot)
    value = {"trace": lesson.name, "provenance": lesson.provenance, "seconds": len(counts), "horizon_s": ahead_s}
    shown: list[RenderableType] = [table(_epochs(told))] if told else []
    shown += [table(found.table()), lesson.provenance]
    return CommandOutput(value | {"every_s": every_s, "scores": found.scores(), "training": told}, shown)


def _lesson(trace: str | None, *, seed: int, trained: bool) -> Lesson:
    if trace is None:
        return fortnight(data_folder(), seed=seed)
    found = trace_at(trace, seed=seed, duration_s=None)
    return two_thirds(found) if trained else all_of(found)


def _chosen(names: Sequence[str], counts: Sequence[int], horizon_s: int) -> dict[str, Forecast]:
    """The forecasters asked for, each under the words it was asked for with."""
    if not names:
        return every_forecaster(counts, horizon_s=horizon_s)
    chosen = {}
    for words in names:
        parameters = mapping(words, NAMES) if words.lstrip().startswith("{") else {"name": words}
        name = str(parameters.pop("name", ""))
        chosen[words] = forecaster(name, parameters, counts, horizon_s=horizon_s)
    return chosen


def _trained(
    lesson: Lesson, shape: tuple[int, int, int], how: LstmTraining, seed: int, told: list[TrainingEpoch]
) -> LstmNetwork:
    with progress("training", total=how.epochs) as advance:

        def say(epoch: TrainingEpoch) -> None:
            told.append(epoch)
            advance(epoch.number, f"error {100 * epoch.held_back:.2f} %")

        return learned(lesson.before, shape, seed=seed, how=how, say=say)


def _write(network: LstmNetwork, into: Path) -> None:
    """The weights in lines, bare or as a policy below `system:` in an application file."""
    text = network.encoded()
    lines = [text[at : at + LINE] for at in range(0, len(text), LINE)]
    if into.suffix in {".yaml", ".yml"}:
        lines = ["forecast:", "  name: lstm", "  weights: >-", *(f"    {line}" for line in lines)]
    try:
        into.write_text("\n".join(lines) + "\n", encoding="ascii")
    except OSError as error:
        help_text = "name a file in a folder that may be written"
        raise MachineError(f"{into} cannot be written: {error.strerror}", help=help_text) from error


def _epochs(told: Sequence[TrainingEpoch]) -> Table:
    rows = tuple((epoch.number, 100 * epoch.trained, 100 * epoch.held_back, epoch.best) for epoch in told)
    return Table("LstmTraining", ("epoch", "error %", "error on what was held back %", "best so far"), rows)


if __name__ == "__main__":
    forecast()
