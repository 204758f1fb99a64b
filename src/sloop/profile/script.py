"""A stage written in Python: a file with a class `Model`, which says what it takes and gives and runs on what it likes.

    class Model:
        inputs = {"image": ("UINT8", (1, -1, -1, 3))}    # datatypes of the Open Inference Protocol v2; -1 is open
        outputs = {"scores": ("FP32", (1, 10))}
        joins_rows = False                               # optional: see `Session.joins_rows`
        software = "ONNX Runtime 1.20"                   # optional: what it computes with, for its profile

        def __init__(self, threads: int) -> None: ...
        def run(self, image): ...                        # arrays in the order of `inputs`; see `_in_order`
        def example(self, rows: int): ...                # optional: realistic inputs, where noise means nothing

Promises that a class which does not keep to this is refused with the reason (`InputError`), and that what `run` gives
is what `outputs` says, or it raises. The file is run once per process, with its folder first on the import path, like a
program's; never in the server's.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from sloop.authored import module_in, raise_theirs
from sloop.errors import InputError
from sloop.profile.session import Array
from sloop.tensor import NUMPY_TYPES, Port, Signature

SHAPE_OF_CLASS: Final = 'inputs = {"image": ("UINT8", (1, -1, -1, 3))}, outputs likewise, __init__(self, threads), run'


class ScriptSession:
    """An object of the file's class `Model`, as `sloop.profile.session` asks."""

    def __init__(self, path: Path, threads: int) -> None:
        self._path = path
        declared = class_in(path)
        self.signature = Signature(_ports(declared, "inputs", path), _ports(declared, "outputs", path))
        self.joins_rows = _joins_rows(declared, self.signature, path)
        if not callable(getattr(declared, "run", None)):
            raise InputError("class 'Model' has no method 'run'", where=str(path), help=f"give it {SHAPE_OF_CLASS}")
        try:
            self._model = declared(threads)
            self.software = str(getattr(self._model, "software", ""))
        except (Exception, SystemExit) as error:  # the author's code
            raise_theirs(error, path, "its class 'Model' cannot be made")

    def example(self, rows: int) -> dict[str, Array] | None:
        """What the class's own `example` gives, checked; None where it has none."""
        if not hasattr(self._model, "example"):
            return None
        try:
            made = _in_order(self._model.example(rows), self.signature.inputs, "example")
        except (Exception, SystemExit) as error:
            raise_theirs(error, self._path, "its 'example' fails")
        feed = {port.name: array for port, array in zip(self.signature.inputs, made, strict=True)}
        for port, array in zip(self.signature.inputs, made, strict=True):
            if port.shape and len(array) != rows:
                raise InputError(
                    f"its 'example' of {rows} rows gives {len(array)} of input {port.name!r}",
                    where=str(self._path),
                    help="measure --batches 1" if port.shape[0] == 1 else "give as many rows as are asked for",
                )
        return feed

    def run(self, feed: Mapping[str, Array]) -> list[Array]:
        """One pass. ValueError or TypeError where the outputs are not those declared."""
        given = self._model.run(*(feed[port.name] for port in self.signature.inputs))
        return _in_order(given, self.signature.outputs, "run")


def class_in(path: Path) -> Any:  # noqa: ANN401  # the author's
    """The class `Model` of a file, which is run the first time. InputError where it fails or has none."""
    declared = getattr(module_in(path), "Model", None)
    if not isinstance(declared, type):
        raise InputError("it has no class 'Model'", where=str(path), help=f"write one with {SHAPE_OF_CLASS}")
    return declared


def _ports(declared: Any, kind: str, path: Path) -> tuple[Port, ...]:  # noqa: ANN401
    given = getattr(declared, kind, None)
    if not isinstance(given, Mapping) or not given:
        what = f"class 'Model' says no {kind!r}" if not given else f"{kind!r} of class 'Model' is no mapping"
        raise InputError(what, where=str(path), help=f"give it {SHAPE_OF_CLASS}")
    return tuple(_port(name, port, kind, path) for name, port in given.items())


def _port(name: object, given: object, kind: str, path: Path) -> Port:
    match name, given:
        case str(), (str(datatype), [*sizes]) if all(type(size) is int and (size == -1 or size > 0) for size in sizes):
            if datatype not in NUMPY_TYPES:
                text = "; texts travel as UINT8, their UTF-8 bytes" if datatype == "BYTES" else ""
                raise InputError(
                    f"{name!r} is of type {datatype}, which cannot be served",
                    where=str(path),
                    help=f"use one of {', '.join(NUMPY_TYPES)}{text}",
                )
            return Port(name, datatype, tuple(size for size in sizes if isinstance(size, int)))
    raise InputError(
        f"{name!r} of {kind!r} is {given!r}, not a datatype and a shape",
        where=str(path),
        help='write for example ("FP32", (-1, 3, 224, 224)), with -1 for an open dimension',
    )


def _joins_rows(declared: Any, signature: Signature, path: Path) -> bool | None:  # noqa: ANN401
    said = getattr(declared, "joins_rows", None)
    if said not in (None, True, False):
        raise InputError(f"'joins_rows' is {said!r}", where=str(path), help="write True or False, or leave it out")
    for port in (*signature.inputs, *signature.outputs):
        if said and port.shape[:1] != (-1,):
            what = f"it says that rows may be joined, but the first dimension of {port.name!r} is not open"
            raise InputError(what, where=str(path), help="make it -1, or leave 'joins_rows' out")
    return None if said is None else bool(said)


def _in_order(given: Any, ports: Sequence[Port], method: str) -> list[Array]:  # noqa: ANN401
    """What `run` or `example` returned, in the order of `ports`: a mapping by name, a sequence, or a single array.

    TypeError or ValueError for anything but the arrays that were declared.
    """
    names = [port.name for port in ports]
    if isinstance(given, Mapping):
        if given.keys() != set(names):
            raise ValueError(f"'{method}' gives {sorted(map(str, given))}; {names} are declared")
        arrays = [given[name] for name in names]
    elif isinstance(given, tuple | list):
        arrays = list(given)
    else:
        arrays = [given]
    if len(arrays) != len(ports):
        raise ValueError(f"'{method}' gives {len(arrays)} arrays; {len(ports)} are declared: {names}")
    for port, array in zip(ports, arrays, strict=True):
        if not isinstance(array, np.ndarray):
            raise TypeError(f"'{method}' gives {port.name!r} as {type(array).__name__}, not as a NumPy array")
        fits = len(array.shape) == len(port.shape) and all(
            size in (-1, there) for size, there in zip(port.shape, array.shape, strict=True)
        )
        if array.dtype != NUMPY_TYPES[port.datatype] or not fits:
            is_ = f"{array.dtype}{list(array.shape)}"
            raise ValueError(f"'{method}' gives {port.name!r} as {is_}, declared as {port.datatype}{list(port.shape)}")
    return arrays
