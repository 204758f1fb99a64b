"""What the programs of all peers share: their settings, and the same forward pass on one thread."""

import json
import os
from types import SimpleNamespace

import numpy as np
import onnxruntime

SETTINGS = SimpleNamespace(**json.loads(os.environ["PEER_SETTINGS"]))
ROW = tuple(SETTINGS.row)
ANSWER = tuple(SETTINGS.answer)
IS_BINARY = SETTINGS.encoding == "binary"


class Passes:
    """The model, opened with one thread."""

    def __init__(self):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(SETTINGS.model, options, providers=["CPUExecutionProvider"])

    def run(self, batch):
        """The outputs of a whole batch."""
        return self._session.run([SETTINGS.output], {SETTINGS.input: batch})[0]


def row_of(raw):
    """One request's tensor, of its bytes."""
    return np.frombuffer(raw, dtype=np.float32).reshape(ROW)
