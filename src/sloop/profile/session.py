"""A model file made ready to run, whatever is in it: an ONNX graph, or Python with a class `Model`.

What is measured, examined and served is opened here, so that a profile is that of the replica. A framework is imported
when the first of its files is opened.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from sloop.profile.inputs import input_shapes, synthesise
from sloop.tensor import NUMPY_TYPES, Signature

PYTHON: Final = ".py"

Array = np.ndarray[Any, np.dtype[Any]]


class Session(Protocol):
    """A model on a fixed number of threads. `run` raises what the framework raises, and
    may be called from another thread than that which made it."""

    signature: Signature
    joins_rows: bool | None
    """Whether a batch gives for every row what the row gives alone, as its author says; None: it is to be tried."""
    software: str
    """What runs it, with its version; empty where that is Python alone."""

    def example(self, rows: int) -> Mapping[str, Array] | None:
        """Realistic inputs of so many rows, where the model brings some. InputError for unfit ones."""
        ...

    def run(self, feed: Mapping[str, Array]) -> Sequence[Array]:
        """One forward pass over inputs by name: the outputs in the signature's order."""
        ...


def is_python(path: Path) -> bool:
    """Whether opening the file runs its author's code."""
    return path.suffix == PYTHON


def open_model(path: Path, threads: int, *, optimise: bool = True) -> Session:
    """The model in `path` on `threads` threads; without `optimise` it loads faster. InputError for an unusable file."""
    if is_python(path):
        from sloop.profile.script import ScriptSession  # noqa: PLC0415  # one framework per process

        return ScriptSession(path, threads)
    from sloop.profile.model import OnnxSession  # noqa: PLC0415

    return OnnxSession(path, threads, optimise=optimise)


def feed_for(session: Session, batch: int, shapes: Mapping[str, tuple[int, ...]], *, where: str) -> dict[str, Array]:
    """Inputs for a batch: of the row shapes given, else the model's own example, else made up.

    InputError where the batch is fixed to another size, or nothing says how long an open dimension is.
    """
    example = None if shapes else session.example(batch)
    if example is not None:
        return dict(example)
    return dict(synthesise(session.signature, input_shapes(session.signature, batch, shapes, where=where)))


def zeros(signature: Signature) -> dict[str, Array] | None:
    """One row of zeros, only where every dimension but the first is known: guessed shapes could be refused."""
    feed = {}
    for port in signature.inputs:
        shape = [1 if place == 0 and size < 0 else size for place, size in enumerate(port.shape)]
        if port.datatype not in NUMPY_TYPES or -1 in shape:
            return None
        feed[port.name] = np.zeros(shape, NUMPY_TYPES[port.datatype])
    return feed
