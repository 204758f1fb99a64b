"""The model behind LitServe: JSON, or the raw tensor as an uploaded file."""

import litserve
import numpy as np
from fastapi import Response
from passes import IS_BINARY, ROW, SETTINGS, Passes, row_of


class Inference(litserve.LitAPI):
    def setup(self, device):
        self._passes = Passes()

    def decode_request(self, request):
        if IS_BINARY:
            return row_of(request["x"].file.read())
        return np.array(request["x"], dtype=np.float32).reshape(ROW)

    def batch(self, inputs):
        return np.stack(inputs)

    def predict(self, given):
        return self._passes.run(given) if SETTINGS.batch_max > 1 else self._passes.run(given[np.newaxis])[0]

    def unbatch(self, output):
        return list(output)

    def encode_response(self, output):
        if IS_BINARY:
            return Response(output.tobytes(), media_type="application/octet-stream")
        return {"y": output.tolist()}


if __name__ == "__main__":
    wait_s = float(SETTINGS.options.get("wait_s", 0.0))
    api = Inference(max_batch_size=SETTINGS.batch_max, batch_timeout=wait_s)
    is_fast = SETTINGS.options.get("queue") == "fast"
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, fast_queue=is_fast)
    server.run(host="127.0.0.1", port=SETTINGS.port, generate_client_file=False, log_level="warning")
