"""Stage `inspect`: a model on a server, for flows that the switches are not sure of.

It stands for a larger model. Here it is the network that ships, with weights and activations that are not rounded.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import onnxruntime  # type: ignore[import-untyped]

from sloop_systems.netnn.shipped import shipped_file

Array = np.ndarray[Any, np.dtype[Any]]


class Model:
    """Takes what the switches took, and returns the outputs that replace theirs."""

    inputs: ClassVar = {"features": ("UINT8", (-1, 814))}
    outputs: ClassVar = {"logits": ("INT32", (-1, 1)), "class": ("INT32", (-1, 1))}
    joins_rows = True
    software = f"ONNX Runtime {onnxruntime.__version__}"

    def __init__(self, threads: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self._session = onnxruntime.InferenceSession(str(shipped_file()), options)

    def run(self, features: Array) -> Sequence[Array]:
        """Logits in thousandths, and the class."""
        logits = self._session.run(None, {"features": features.astype(np.float32)})[0]
        return np.rint(1000 * logits).astype(np.int32), (logits >= 0).astype(np.int32)

    def example(self, rows: int) -> dict[str, Array]:
        """Random bits."""
        return {"features": np.random.default_rng(0).integers(0, 2, (rows, 814), np.uint8)}
