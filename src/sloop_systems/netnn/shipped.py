"""The detection model that ships: the published network for flows, trained on generated traffic.

Its card, `intrusion.json`, says from what. It knows only the traffic of that generator. What trained it, and what
classifies packets with it, is in commit 2ec464c1.
"""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from sloop.api import InputError, counted
from sloop_systems.netnn.features import FeatureEncoding, Representation
from sloop_systems.netnn.network import Network
from sloop_systems.netnn.quantiser import quantise

NAME: Final = "intrusion"


class ModelCard(Struct, frozen=True, forbid_unknown_fields=True):
    """What is known of a trained model besides its weights; the file beside it, as JSON."""

    command: str
    """What made it."""
    representation: Representation
    identity: bool
    inputs: int
    shifts: tuple[int, ...]
    """Of all layers but the last."""
    flows: int
    """Of which 72 % trained it."""
    seed: int
    epochs: int
    flow_accuracy: float
    """Of the integers, for flows that it has not seen."""

    @property
    def encoding(self) -> FeatureEncoding:
        """How its inputs are made."""
        return FeatureEncoding(self.representation, identity=self.identity, length=self.inputs)


@dataclass(frozen=True)
class DetectionModel:
    """A network and where it came from."""

    network: Network
    card: ModelCard


def shipped_file() -> Path:
    """The ONNX file of the model that ships; its card lies beside it."""
    return Path(str(files("sloop_systems.netnn") / f"{NAME}.onnx"))


def shipped_model() -> DetectionModel:
    """The model that ships."""
    return load(shipped_file())


def load(path: Path) -> DetectionModel:
    """A model with its card beside it. InputError if one of the files is missing or damaged, or they do not fit."""
    card_file = path.with_suffix(".json")
    help = "write a right card, or calibrate the model with --rows FILE.npy"
    try:
        card = msgspec.json.decode(card_file.read_bytes(), type=ModelCard)
    except OSError as error:
        what = f"the card of {path.name} cannot be read: {error.strerror}"
        raise InputError(what, where=str(card_file), help=help) from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise InputError(f"it is no card of a model: {error}", where=str(card_file), help=help) from error
    network = quantise(path, inputs=card.encoding.range, shifts=card.shifts)
    if (network.input_count, network.classes) != (card.encoding.inputs, 1):
        raise InputError(
            f"it has {counted(network.input_count, 'input')} and {counted(network.classes, 'logit')}; its card says "
            f"{counted(card.encoding.inputs, 'input')}, and detection takes one logit",
            where=str(path),
            help=help,
        )
    return DetectionModel(network, card)
