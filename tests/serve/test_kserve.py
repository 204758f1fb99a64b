"""The KServe client, REST and gRPC, JSON and binary, against a real server.

The client brings many packages of its own, so it may live in another environment: name its Python in
`SLOOP_KSERVE_PYTHON` (`python -m venv DIR && DIR/bin/pip install kserve`).
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped]
import pytest

from tests.serve.gateway.fakes import LoopThread
from tests.serve.test_server import Running, document

PYTHON = os.environ.get("SLOOP_KSERVE_PYTHON") or (sys.executable if importlib.util.find_spec("kserve") else "")

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(not PYTHON, reason="the KServe client is not installed; see SLOOP_KSERVE_PYTHON"),
]

CLIENT = """
import asyncio, json, sys
import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig

http, grpc, x = sys.argv[1], sys.argv[2], np.array(json.loads(sys.argv[3]), np.float32)

def request(binary):
    tensor = InferInput("x", list(x.shape), "FP32")
    tensor.set_data_from_numpy(x, binary_data=binary)
    return InferRequest(model_name="demo", infer_inputs=[tensor], request_id="kserve")

async def main():
    rest, rpc = InferenceRESTClient(RESTConfig(protocol="v2")), InferenceGRPCClient(grpc)
    ready = [await rest.is_server_ready(http), await rest.is_model_ready(http, "demo")]
    ready.append(await rpc.is_model_ready("demo"))
    told = [await rest.infer(http, request(binary), model_name="demo") for binary in (False, True)]
    told += [await rpc.infer(request(binary)) for binary in (False, True)]
    print(json.dumps([ready, [answer.outputs[0].as_numpy().tolist() for answer in told]]))

asyncio.run(main())
"""


@pytest.fixture
def running(tmp_path: Path, mlp: Path) -> Iterator[Running]:
    thread = LoopThread()
    running = Running(thread, tmp_path, document(mlp))
    running.wait_until_ready()
    yield running
    running.close()
    thread.close()


def test_it_gets_onnx_runtimes_own_answer(running: Running, mlp: Path) -> None:
    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    server = running.server
    addresses = [f"http://127.0.0.1:{server.http_port}", f"127.0.0.1:{server.grpc_port}"]
    command = [PYTHON, "-c", CLIENT, *addresses, json.dumps(x.tolist())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    ready, answers = json.loads(done.stdout.splitlines()[-1])
    assert ready == [True, True, True]
    (expected,) = ort.InferenceSession(mlp).run(None, {"x": x})
    assert len(answers) == 4
    for answer in answers:
        np.testing.assert_allclose(answer, expected, rtol=1e-6)
