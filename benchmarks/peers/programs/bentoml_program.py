"""The model behind BentoML: a tensor in JSON, or its bytes as an uploaded file. Loaded by `bentoml serve`."""

from pathlib import Path
from typing import Annotated

import bentoml
import numpy as np
from bentoml.validators import DType
from passes import IS_BINARY, SETTINGS, Passes, row_of

LIMITS = {name: int(value) for name, value in SETTINGS.limits.items()}
LATENCY = {"max_latency_ms": LIMITS.pop("max_latency_ms")} if "max_latency_ms" in LIMITS else {}
BATCHES = {"batchable": True, "max_batch_size": SETTINGS.batch_max, **LATENCY} if SETTINGS.batch_max > 1 else {}
Tensor = Annotated[np.ndarray, DType("float32")]


@bentoml.service(workers=1, traffic=LIMITS)
class Inference:
    def __init__(self):
        self._passes = Passes()

    if IS_BINARY:

        @bentoml.api(**BATCHES)
        def predict(self, x: list[Path]) -> Tensor:
            return self._passes.run(np.stack([row_of(path.read_bytes()) for path in x]))

    else:

        @bentoml.api(**BATCHES)
        def predict(self, x: Tensor) -> Tensor:
            return self._passes.run(x)
