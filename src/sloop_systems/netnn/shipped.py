"""The detection model that ships with the package: how it was made, and how to load it.

    python -m sloop_systems.netnn.shipped --seed 1 --flows 2400 --out FOLDER

makes `intrusion.onnx` and `intrusion.json`.

It is the published network for flows, trained on `netnn.traffic.mixed` with addresses and ports masked, so that
it recognises hostile traffic by its behaviour. It knows only the traffic of that generator: train one on captures of
your own network before you believe a verdict.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from msgspec import Struct

from sloop.api import InputError, counted
from sloop.api.models import write_onnx
from sloop_systems.netnn.accuracy import Protocol, dataset, flow_accuracy, split
from sloop_systems.netnn.detection import POINTS, FeatureEncoding, Representation
from sloop_systems.netnn.network import Network
from sloop_systems.netnn.quantiser import quantise
from sloop_systems.netnn.traffic import mixed
from sloop_systems.netnn.training import FLOW_MODEL, LabelledRows, TrainingSchedule, fit, onnx_message

NAME: Final = "intrusion"


class ModelCard(Struct, frozen=True, forbid_unknown_fields=True):
    """What is known of a trained model besides its weights; the file beside it, as JSON."""

    command: str
    """What made it."""
    representation: str
    identity: bool
    inputs: int
    shifts: tuple[int, ...]
    """Of all layers but the last."""
    flows: int
    """Of which 72 % trained it."""
    seed: int
    epochs: int
    packet_accuracy: float
    """Of the integers, for single inference points of flows that it has not seen."""
    flow_accuracy: float
    by_class: dict[str, float]
    """Flow accuracy by class of traffic."""

    @property
    def encoding(self) -> FeatureEncoding:
        """How its inputs are made."""
        return FeatureEncoding(Representation(self.representation), identity=self.identity, length=self.inputs)


@dataclass(frozen=True)
class DetectionModel:
    """A network, its encoding and where it came from."""

    network: Network
    card: ModelCard

    @property
    def encoding(self) -> FeatureEncoding:
        """How its inputs are made."""
        return self.card.encoding


def shipped_file() -> Path:
    """The ONNX file of the model that ships; its card lies beside it."""
    return Path(str(files("sloop_systems.netnn") / f"{NAME}.onnx"))


def shipped_model() -> DetectionModel:
    """The model that ships."""
    return load(shipped_file())


def load(path: Path) -> DetectionModel:
    """A model made by this module. InputError if one of its files is missing or damaged, or they do not fit."""
    card_file = path.with_suffix(".json")
    make = "make both files with `python -m sloop_systems.netnn.shipped`"
    try:
        card = msgspec.json.decode(card_file.read_bytes(), type=ModelCard)
        encoding = card.encoding
    except OSError as error:
        raise InputError(
            f"the card of {path.name} cannot be read: {error.strerror}", where=str(card_file), help=make
        ) from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise InputError(f"it is no card of a model: {error}", where=str(card_file), help=make) from error
    network = quantise(path, inputs=encoding.range, shifts=card.shifts)
    if (network.input_count, network.classes) != (encoding.inputs, 1):
        raise InputError(
            f"it has {counted(network.input_count, 'input')} and {counted(network.classes, 'logit')}; its card says "
            f"{counted(encoding.inputs, 'input')}, and detection takes one logit",
            where=str(path),
            help=make,
        )
    return DetectionModel(network, card)


def make(seed: int, flows: int, folder: Path, *, epochs: int = 30, report: Any = None) -> ModelCard:  # noqa: ANN401
    """Train the model and write its two files into `folder`."""
    data = dataset(mixed(seed, flows), histograms=False)
    encoding = FeatureEncoding()
    rows, parts = encoding.from_arrays(data.points).astype(np.uint8), split(data, Protocol.FLOWS_MASKED, seed)
    train, early = (LabelledRows(rows[part], data.labels[part]) for part in (parts.train, parts.early))
    made = fit(FLOW_MODEL, train, early, seed=seed, schedule=TrainingSchedule(epochs, halve_after=1), progress=report)
    labels, flow = data.labels[parts.test], data.flow[parts.test]
    logits = made.integers().run(rows[parts.test].astype(np.int64))[:, 0]
    classes = np.array(data.classes)[flow]
    by_class = {
        str(each): round(
            flow_accuracy(logits[classes == each], flow[classes == each], labels[classes == each], len(POINTS)), 3
        )
        for each in np.unique(classes)
    }
    card = ModelCard(
        f"python -m sloop_systems.netnn.shipped --seed {seed} --flows {flows}",
        encoding.representation.value,
        encoding.identity,
        encoding.inputs,
        made.shifts,
        flows,
        seed,
        made.epochs,
        round(float(((logits >= 0) == labels).mean()), 4),
        round(flow_accuracy(logits, flow, labels, len(POINTS)), 4),
        by_class,
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_onnx(onnx_message(made.network), folder / f"{NAME}.onnx")
    (folder / f"{NAME}.json").write_text(json.dumps(msgspec.to_builtins(card), indent=2) + "\n", encoding="utf-8")
    return card


def main() -> None:
    """The command in the module docstring."""
    parser = argparse.ArgumentParser(description="Train the detection model that ships.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--flows", type=int, default=2400)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()

    def report(_: int, line: str) -> None:
        sys.stderr.write(f"{line}\n")

    card = make(given.seed, given.flows, given.out, epochs=given.epochs, report=report)
    sys.stdout.write(f"{card.flow_accuracy:.1%} of the flows, {card.packet_accuracy:.1%} of the points\n")


if __name__ == "__main__":
    main()
