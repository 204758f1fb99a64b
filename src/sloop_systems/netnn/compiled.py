"""The file of a compiled network (`MODEL.innet`): its integers and its fabric. A loaded file gives the same program as
before, with the same answers, bit for bit.

The file is a NumPy archive (`.npz`) with the weights, and a JSON header with everything else. Loading it executes no
code from it.
"""

import json
import struct
import zipfile
import zlib
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sloop.api import InputError, MachineError
from sloop_systems.netnn.mapper import Fabric
from sloop_systems.netnn.network import Convolution, Dense, InputRange, Ints, Layer, Network
from sloop_systems.netnn.program import Program, compile_network

SUFFIX: Final = ".innet"
FORMAT: Final = 1
_DAMAGE: Final = (
    *(ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError, MemoryError),
    *(EOFError, zipfile.BadZipFile, zlib.error, struct.error, NotImplementedError, RuntimeError),
)
"""What NumPy, the archive and the header raise if bytes of the file are others."""


@dataclass(frozen=True)
class CompiledNetwork:
    """A network, the fabric it is compiled for, and what its users should know."""

    network: Network
    fabric: Fabric
    version: int = 1
    doubt: int = 0
    """A row is doubtful if its logit is nearer to 0 than this (of several logits: if the two largest are)."""
    in_kernel: bool = False
    """Whether a server that opens it runs it as programs in the kernel, or as the reference; the answers are equal."""

    @cached_property
    def program(self) -> Program:
        """What every runner executes. NoCapacity if the network does not fit onto the fabric."""
        return compile_network(self.network, self.fabric, self.version)

    def is_doubtful(self, logits: Ints) -> NDArray[np.bool_]:
        """For each row, whether its verdict is doubtful."""
        if logits.shape[1] == 1:
            return np.abs(logits[:, 0]) < self.doubt
        largest = np.sort(logits, axis=1)[:, -2:]
        return (largest[:, 1] - largest[:, 0]) < self.doubt


def save(compiled: CompiledNetwork, path: Path) -> None:
    """Write the file. MachineError if it cannot be written."""
    network = compiled.network
    layers: list[dict[str, Any]] = []
    arrays: dict[str, NDArray[Any]] = {}
    for place, layer in enumerate(network.layers):
        arrays[f"weights{place}"], arrays[f"bias{place}"] = layer.weights.astype(np.int8), layer.bias.astype(np.int32)
        described: dict[str, Any] = {"name": layer.name, "shift": layer.shift}
        if isinstance(layer, Convolution):
            described |= {"pool": layer.pool, "stride": layer.stride, "padding": layer.padding}
        layers.append(described)
    if network.order is not None:
        arrays["order"] = network.order.astype(np.int64)
    header = {
        "format": FORMAT,
        "shape": network.shape,
        "inputs": asdict(network.inputs),
        "layers": layers,
        "fabric": asdict(compiled.fabric),
        "version": compiled.version,
        "doubt": compiled.doubt,
        "in_kernel": compiled.in_kernel,
    }
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    try:
        with path.open("wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    except OSError as error:
        raise MachineError(f"cannot write {str(path)!r}: {error.strerror}", help="give another path") from error


def load(path: Path) -> CompiledNetwork:
    """Read the file. InputError if it is no compiled network."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        header = json.loads(arrays["header"].tobytes())
        if header["format"] != FORMAT:
            raise InputError(
                f"its format is {header['format']}; this is {FORMAT}", where=str(path), help="compile again"
            )
        layers = tuple(_layer(described, arrays, place) for place, described in enumerate(header["layers"]))
        rows, columns, channels = map(int, header["shape"])
        network = Network((rows, columns, channels), layers, InputRange(**header["inputs"]), arrays.get("order"))
        fabric, version, doubt = Fabric(**header["fabric"]), int(header["version"]), int(header["doubt"])
        return CompiledNetwork(network, fabric, version, doubt, bool(header["in_kernel"]))
    except InputError:
        raise
    except OSError as error:
        raise InputError(
            f"cannot be read: {error.strerror or error}", where=str(path), help="check the path"
        ) from error
    except _DAMAGE as error:
        help_text = "make one with `sloop innet compile`"
        raise InputError("it is no compiled network, or truncated", where=str(path), help=help_text) from error


def _layer(described: dict[str, Any], arrays: dict[str, NDArray[Any]], place: int) -> Layer:
    weights, bias = arrays[f"weights{place}"], arrays[f"bias{place}"]
    if "pool" not in described:
        return Dense(described["name"], weights, bias, int(described["shift"]))
    (tall, wide), (down, across) = described["pool"], described["stride"]
    above, left, below, right = described["padding"]
    made = Convolution(described["name"], weights, bias, int(described["shift"]), (tall, wide), (down, across))
    return replace(made, padding=(above, left, below, right))
