"""A text encoder behind mosec: the texts of a batch are padded to the longest one, as its documentation shows it."""

import os

import numpy as np
import onnxruntime
from mosec import Server, Worker

MODEL, BATCH_MAX, WAIT_MS = os.environ["ENCODER"], int(os.environ["BATCH_MAX"]), int(os.environ["WAIT_MS"])


class Inference(Worker):
    resp_mime_type = "application/octet-stream"

    def __init__(self):
        super().__init__()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(MODEL, options, providers=["CPUExecutionProvider"])

    def deserialize(self, data):
        return np.frombuffer(data, dtype=np.int64)

    def serialize(self, data):
        return data.tobytes()

    def forward(self, data):
        return self._batch(data) if BATCH_MAX > 1 else self._batch([data])[0]

    def _batch(self, data):
        ids = np.zeros((len(data), max(map(len, data))), np.int64)
        mask = np.zeros_like(ids)
        for row, text in enumerate(data):
            ids[row, : len(text)] = text
            mask[row, : len(text)] = 1
        return list(self._session.run(["embedding"], {"ids": ids, "mask": mask})[0])


if __name__ == "__main__":
    server = Server()
    server.append_worker(Inference, num=1, max_batch_size=BATCH_MAX, max_wait_time=WAIT_MS)
    server.run()
