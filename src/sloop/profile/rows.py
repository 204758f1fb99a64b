"""Whether requests may share a forward pass: tried, not believed.

Joining requests along the first dimension is right only where every row of a batch gives what it gives alone. An open
first dimension does not say so: it may be a sequence, the outputs of all rows may be lists of another length, a softmax
may run over the rows. A model's author may say so (`Session.joins_rows`). Knows nothing of requests or servers.
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from sloop.profile.session import Session, feed_for

ROWS: Final = 2
TOLERANCES: Final = {"FP16": 1e-2, "FP32": 1e-3, "FP64": 1e-3}
"""Relative to the largest value of an output: a batch takes other kernels, which add up in another order."""


def obstacle(session: Session, shapes: Mapping[str, tuple[int, ...]], *, where: str) -> str:
    """Why rows cannot be joined, in words; empty where they can, and where nothing was found out.

    `shapes` gives one row's shape for inputs with further open dimensions; without them, or an example, such a model is
    not tried.
    """
    signature = session.signature
    for port in (*signature.inputs, *signature.outputs):
        if port.shape[:1] != (-1,):
            return f"the first dimension of {port.name!r} {list(port.shape)} is not open"
    if session.joins_rows is not None:
        return "" if session.joins_rows else "it says that its rows are not to be joined"
    try:
        inputs = feed_for(session, ROWS, shapes, where=where)
        alone = [session.run({name: value[row : row + 1] for name, value in inputs.items()}) for row in range(ROWS)]
    except Exception:  # open dimensions, or a model that refuses what was made up: nothing is known
        return ""
    try:
        together = session.run(inputs)
    except Exception as error:  # frameworks' exceptions share no base
        return f"two rows at once fail: {str(error).splitlines()[0][:200]}"
    for place, port in enumerate(signature.outputs):
        tolerance = TOLERANCES.get(port.datatype, 0.0)
        if not _agree(together[place], [one[place] for one in alone], tolerance):
            return f"output {port.name!r} of two rows at once is not that of each row alone"
    return ""


def _agree(together: Any, alone: list[Any], tolerance: float) -> bool:  # noqa: ANN401  # arrays of any type
    many = np.asarray(together)
    if not many.ndim or any(np.shape(one) != (1, *many.shape[1:]) for one in alone) or len(many) != len(alone):
        return False
    joined = np.concatenate(alone)
    if not tolerance:
        return bool(np.array_equal(many, joined))
    scale = float(np.abs(np.nan_to_num(joined, posinf=0.0, neginf=0.0)).max(initial=0.0)) or 1.0
    return bool(np.allclose(many, joined, rtol=0.0, atol=tolerance * scale, equal_nan=True))
