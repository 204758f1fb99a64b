"""The official Triton client, HTTP and gRPC, in the same process as our own messages of the same names."""

import importlib.util
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped]
import pytest

from tests.serve.gateway.fakes import Gateway, LoopThread
from tests.serve.test_server import Running, document

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    http_client: ModuleType = pytest.importorskip("tritonclient.http")
    grpc_client: ModuleType = pytest.importorskip("tritonclient.grpc")
    triton: ModuleType = pytest.importorskip("tritonclient.utils")

pytestmark = pytest.mark.live


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, gateway: Gateway) -> Any:
    module = http_client if request.param == "http" else grpc_client
    port = gateway.port if request.param == "http" else gateway.grpc_port
    client = module.InferenceServerClient(f"{gateway.host}:{port}")
    yield module, client
    client.close()


def inputs(module: ModuleType, x: Any, k: Any, **options: Any) -> list[Any]:
    given = [module.InferInput("x", x.shape, "FP32"), module.InferInput("k", k.shape, "INT64")]
    for tensor, array in zip(given, (x, k), strict=True):
        tensor.set_data_from_numpy(array, **options)
    return given


def test_sees_server_and_model(client: Any) -> None:
    module, triton_client = client
    assert triton_client.is_server_live()
    assert triton_client.is_server_ready()
    assert triton_client.is_model_ready("demo", "1")
    metadata = triton_client.get_model_metadata("demo")
    names = [port["name"] if module is http_client else port.name for port in getattr_or_key(metadata, "outputs")]
    assert names == ["y", "n"]


def getattr_or_key(value: Any, name: str) -> Any:
    return value[name] if isinstance(value, dict) else getattr(value, name)


def test_infers(client: Any) -> None:
    module, triton_client = client
    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    k = np.array([[1], [2], [3]])
    result = triton_client.infer("demo", inputs(module, x, k), request_id="42")
    np.testing.assert_array_equal(result.as_numpy("y"), x * k.astype(np.float32))
    np.testing.assert_array_equal(result.as_numpy("n"), [[3], [3], [3]])
    only = triton_client.infer("demo", inputs(module, x, k), outputs=[module.InferRequestedOutput("n")])
    assert only.as_numpy("y") is None


def test_infers_in_json(gateway: Gateway) -> None:
    client = http_client.InferenceServerClient(f"{gateway.host}:{gateway.port}")
    x, k = np.full((1, 4), 0.1, np.float32), np.array([[3]])
    wanted = [http_client.InferRequestedOutput("y", binary_data=False)]
    result = client.infer("demo", inputs(http_client, x, k, binary_data=False), outputs=wanted)
    np.testing.assert_array_equal(result.as_numpy("y"), x * np.float32(3))
    client.close()


def test_shows_what_was_wrong(client: Any) -> None:
    module, triton_client = client
    x, k = np.zeros((1, 4), np.float32), np.array([[3]])
    with pytest.raises(triton.InferenceServerException, match="unknown model 'other'"):
        triton_client.infer("other", inputs(module, x, k))
    with pytest.raises(triton.InferenceServerException, match=r"inputs\[0\].shape: \[1, 5\] for input 'x'"):
        triton_client.infer("demo", inputs(module, np.zeros((1, 5), np.float32), k))


PYTHON = os.environ.get("SLOOP_KSERVE_PYTHON") or (sys.executable if importlib.util.find_spec("kserve") else "")

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


@pytest.mark.skipif(not PYTHON, reason="the KServe client is not installed; see SLOOP_KSERVE_PYTHON")
def test_the_kserve_client_gets_onnx_runtimes_own_answer(running: Running, mlp: Path) -> None:
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
