"""Whether requests may share a forward pass: tried, not believed.

Joining requests along the first dimension is right only where every row of a batch gives what it gives alone. An open
first dimension does not say so: it may be a sequence, the outputs of all rows may be lists of another length, a softmax
may run over the rows. Knows nothing of requests or servers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from sloop.errors import InputError
from sloop.profile.model import input_shapes, open_session, signature_of, synthesise
from sloop.tensor import Signature

ROWS: Final = 2
TOLERANCES: Final = {"FP16": 1e-2, "FP32": 1e-3, "FP64": 1e-3}
"""Relative to the largest value of an output: a batch takes other kernels, which add up in another order."""


def examine(path: Path, shapes: Mapping[str, tuple[int, ...]] | None = None) -> tuple[Signature, str]:
    """What the model takes and gives, and its `obstacle`, from one session. InputError for an unusable file."""
    session = open_session(path, 1, optimise=False)
    signature = signature_of(session, path)
    return signature, _obstacle(session, signature, path, shapes)


def obstacle(path: Path, shapes: Mapping[str, tuple[int, ...]] | None = None) -> str:
    """Why rows cannot be joined, in words; empty where they can, and where nothing was found out.

    `shapes` gives one row's shape for inputs with further open dimensions; without them such a model is not tried.
    InputError for an unusable file.
    """
    return examine(path, shapes)[1]


def _obstacle(
    session: Any,  # noqa: ANN401  # ONNX Runtime has no types
    signature: Signature,
    path: Path,
    shapes: Mapping[str, tuple[int, ...]] | None,
) -> str:
    for port in (*signature.inputs, *signature.outputs):
        if port.shape[:1] != (-1,):
            return f"the first dimension of {port.name!r} {list(port.shape)} is not open"
    try:
        inputs = synthesise(signature, input_shapes(signature, ROWS, shapes or {}, where=str(path)))
        alone = [
            session.run(None, {name: value[row : row + 1] for name, value in inputs.items()}) for row in range(ROWS)
        ]
    except Exception:  # open dimensions, or a model that refuses what was made up: nothing is known
        return ""
    try:
        together = session.run(None, inputs)
    except Exception as error:  # ONNX Runtime's exceptions share no base
        return f"two rows at once fail: {str(error).splitlines()[0][:200]}"
    for place, port in enumerate(signature.outputs):
        tolerance = TOLERANCES.get(port.datatype, 0.0)
        if not _agree(together[place], [one[place] for one in alone], tolerance):
            return f"output {port.name!r} of two rows at once is not that of each row alone"
    return ""


def check_rows(path: Path, shapes: Mapping[str, tuple[int, ...]] | None = None) -> None:
    """Raise an InputError where batches of several rows would mean nothing to a server."""
    found = obstacle(path, shapes)
    if found:
        raise InputError(
            f"{found}, so that requests cannot share a forward pass",
            where=str(path),
            help="measure what one request needs, with --batches 1; a batch that was fixed may open with --free-batch",
        )


def _agree(together: Any, alone: list[Any], tolerance: float) -> bool:  # noqa: ANN401  # arrays of any type
    many = np.asarray(together)
    if not many.ndim or any(np.shape(one) != (1, *many.shape[1:]) for one in alone) or len(many) != len(alone):
        return False
    joined = np.concatenate(alone)
    if not tolerance:
        return bool(np.array_equal(many, joined))
    scale = float(np.abs(np.nan_to_num(joined, posinf=0.0, neginf=0.0)).max(initial=0.0)) or 1.0
    return bool(np.allclose(many, joined, rtol=0.0, atol=tolerance * scale, equal_nan=True))
