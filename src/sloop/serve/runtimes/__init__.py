"""The seam between a worker process and what computes: three verbs, so that another framework is one file.

A runtime runs in the worker only. Models are named by a path (ONNX or Python, see `sloop.profile.session`), or by
`fake:…` for tests and demonstrations.
"""

from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np

THREAD_COUNTS_MAX: Final = 4
"""Thread counts a runtime keeps ready at once: for some frameworks each holds its own copy of the weights."""

Array = np.ndarray[Any, np.dtype[Any]]


class Runtime(Protocol):
    """A model made ready to run on a number of threads, which may change while it serves.

    Another thread may call `load` and `warm` while `run` is in progress. All raise what the framework raises.
    """

    def load(self, threads: int) -> bool:
        """Be able to run on `threads` threads; False where it already was."""
        ...

    def warm(self, threads: int) -> None:
        """Run once on nothing in particular, where that speeds up what follows."""
        ...

    def run(self, inputs: Sequence[Array], threads: int) -> tuple[Sequence[Array], int]:
        """One forward pass over `inputs` in the model's order: its outputs in order, and the threads it ran on.

        Those are `threads` where that many are loaded, otherwise the nearest number that is. The inputs' memory is the
        caller's, who reuses it once the outputs are sent.
        """
        ...


def open_runtime(model: str) -> Runtime:
    """The runtime for `model`; imports its framework, which takes a while, and reads the model at `load`."""
    if model.startswith("fake:"):
        from sloop.serve.runtimes.fake import FakeRuntime  # noqa: PLC0415  # a worker imports one framework only

        return FakeRuntime.parse(model)
    from sloop.serve.runtimes.files import FileRuntime  # noqa: PLC0415

    return FileRuntime(model)
