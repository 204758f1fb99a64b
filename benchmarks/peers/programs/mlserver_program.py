"""The model behind MLServer: the Open Inference Protocol in JSON, its tensor as numbers or as base64 of its bytes.

A custom runtime; `mlserver start` loads it, in a worker process, by the name that `model-settings.json` gives.
"""

import numpy as np
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.codecs.base64 import Base64Codec
from mlserver.types import InferenceResponse
from passes import IS_BINARY, SETTINGS, Passes, row_of


class Inference(MLModel):
    async def load(self):
        self._passes = Passes()
        return True

    async def predict(self, payload):
        (given,) = payload.inputs
        if IS_BINARY:
            batch = np.stack([row_of(raw) for raw in Base64Codec.decode_input(given)])
        else:
            batch = NumpyCodec.decode_input(given).astype(np.float32)
        output = NumpyCodec.encode_output(SETTINGS.output, self._passes.run(batch))
        return InferenceResponse(model_name=self.name, outputs=[output])
