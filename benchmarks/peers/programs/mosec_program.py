"""The model behind mosec: JSON by its default, JSON by msgspec, or the raw tensor as the body."""

import numpy as np
from mosec import Server, Worker
from passes import IS_BINARY, SETTINGS, Passes, row_of

BY_MSGSPEC = SETTINGS.options["serializer"] == "msgspec"
if BY_MSGSPEC:
    from msgspec import json


class Inference(Worker):
    def __init__(self):
        super().__init__()
        self._passes = Passes()

    if IS_BINARY:
        resp_mime_type = "application/octet-stream"

        def deserialize(self, data):
            return row_of(data)

        def serialize(self, data):
            return data.tobytes()

        def answers(self, data):
            return list(self._passes.run(np.stack(data)))

    else:
        if BY_MSGSPEC:

            def deserialize(self, data):
                return json.decode(data)

            def serialize(self, data):
                return json.encode(data)

        def answers(self, data):
            batch = np.array([entry["x"] for entry in data], dtype=np.float32)
            return [{"y": row.tolist()} for row in self._passes.run(batch)]

    def forward(self, data):
        return self.answers(data) if SETTINGS.batch_max > 1 else self.answers([data])[0]


if __name__ == "__main__":
    server = Server()
    wait_ms = int(SETTINGS.options.get("wait_ms", 0))
    server.append_worker(Inference, num=1, max_batch_size=SETTINGS.batch_max, max_wait_time=wait_ms)
    server.run()
