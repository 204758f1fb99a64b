"""The model behind Ray Serve: JSON, or the raw tensor as the body; a cluster of this machine alone."""

import signal

import numpy as np
import ray
from passes import IS_BINARY, ROW, SETTINGS, Passes, row_of
from ray import serve
from starlette.responses import Response

LIMITS = {name: int(value) for name, value in SETTINGS.limits.items()}


@serve.deployment(num_replicas=1, ray_actor_options={"num_cpus": 1}, **LIMITS)
class Inference:
    def __init__(self):
        self._passes = Passes()

    if SETTINGS.batch_max > 1:

        @serve.batch(max_batch_size=SETTINGS.batch_max, batch_wait_timeout_s=float(SETTINGS.options["wait_s"]))
        async def predict(self, rows):
            return list(self._passes.run(np.stack(rows)))

    else:

        async def predict(self, row):
            return self._passes.run(row[np.newaxis])[0]

    async def __call__(self, request):
        if IS_BINARY:
            output = await self.predict(row_of(await request.body()))
            return Response(output.tobytes(), media_type="application/octet-stream")
        message = await request.json()
        output = await self.predict(np.array(message["x"], dtype=np.float32).reshape(ROW))
        return {"y": output.tolist()}


if __name__ == "__main__":
    ray.init(_node_ip_address="127.0.0.1", include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": SETTINGS.port})
    serve.run(Inference.bind(), route_prefix="/")
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.pause()
    serve.shutdown()
    ray.shutdown()
