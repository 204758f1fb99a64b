"""The official Triton client, HTTP and gRPC, in the same process as our own messages of the same names."""

import importlib.util
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped]
import pytest

from sloop.units import ms
from tests.serve.edge.fakes import Gateway, LoopThread
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


def test_gets_classes(client: Any, gateway: Gateway) -> None:
    module, triton_client = client
    assert gateway.service is not None
    gateway.service.add(replace(gateway.service.models["demo"], labels={"y": ("a", "b", "c")}))
    x, k = np.array([[1, 4, 2, 3], [9, 0, 0, 0]], np.float32), np.array([[1], [1]])
    wanted = [module.InferRequestedOutput("y", class_count=2), module.InferRequestedOutput("n")]
    result = triton_client.infer("demo", inputs(module, x, k), outputs=wanted)
    assert result.as_numpy("y").tolist() == [[b"4.000000:1:b", b"3.000000:3"], [b"9.000000:0:a", b"0.000000:1:b"]]
    assert result.as_numpy("n").tolist() == [[2], [2]]


def test_deadline_and_refusals_of_tritons_parameters(client: Any, gateway: Gateway) -> None:
    module, triton_client = client
    given = inputs(module, np.zeros((1, 4), np.float32), np.array([[1]]))
    triton_client.infer("demo", given, timeout=50_000, parameters={"mine": "a", "other": 1})
    _, slo_ns, _ = gateway.driver.seen[-1]
    assert slo_ns == ms(50)
    for refused in ({"priority": 3}, {"sequence_id": 4, "sequence_start": True}, {"parameters": {"timeout_ms": 3}}):
        with pytest.raises(triton.InferenceServerException, match=r"parameters\.\w+: .*; help: "):
            triton_client.infer("demo", given, **refused)
    assert len(gateway.driver.seen) == 1


def test_shared_memory_is_refused(client: Any) -> None:
    module, triton_client = client
    given = inputs(module, np.zeros((1, 4), np.float32), np.array([[1]]))
    given[0].set_shared_memory("region", 16)
    with pytest.raises(triton.InferenceServerException, match="reads no shared memory of clients"):
        triton_client.infer("demo", given)


def test_reads_numbers_that_are_not_finite_from_json(gateway: Gateway) -> None:
    client = http_client.InferenceServerClient(f"{gateway.host}:{gateway.port}")
    x, k = np.array([[np.nan, np.inf, -np.inf, 1]], np.float32), np.array([[2]])
    wanted = [http_client.InferRequestedOutput("y", binary_data=False)]
    result = client.infer("demo", inputs(http_client, x, k, binary_data=False), outputs=wanted)
    np.testing.assert_array_equal(result.as_numpy("y"), x * 2)
    client.close()


def test_reads_statistics(client: Any) -> None:
    module, triton_client = client
    options = {} if module is http_client else {"as_json": True}
    (found,) = triton_client.get_inference_statistics("demo", "1", **options)["model_stats"]
    assert (found["name"], int(found["inference_count"])) == ("demo", 2)
    assert int(found["inference_stats"]["success"]["count"]) == 2
    assert [int(each["compute_infer"]["ns"]) for each in found["batch_stats"]] == [10, 20]
    assert len(triton_client.get_inference_statistics(**options)["model_stats"]) == 1
    with pytest.raises(triton.InferenceServerException, match="unknown model"):
        triton_client.get_inference_statistics("other")


def test_reads_the_configuration(client: Any) -> None:
    module, triton_client = client
    found = triton_client.get_model_config("demo", "1", **({} if module is http_client else {"as_json": True}))
    found = found.get("config", found)
    assert (found["name"], found["backend"], found["max_batch_size"]) == ("demo", "sloop", 8)
    assert [(each["name"], each["data_type"], [*map(int, each["dims"])]) for each in found["input"]] == [
        ("x", "TYPE_FP32", [4]),
        ("k", "TYPE_INT64", [1]),
    ]


def test_loads_and_unloads_models(client: Any, gateway: Gateway) -> None:
    module, triton_client = client
    index = triton_client.get_model_repository_index()
    names = [each["name"] for each in index] if module is http_client else [each.name for each in index.models]
    assert names == ["demo", "other"]
    triton_client.load_model("other")
    triton_client.unload_model("other")
    assert gateway.changes == [("other", True), ("other", False)]
    with pytest.raises(triton.InferenceServerException, match="the repository has no model 'none'; help: it has"):
        triton_client.load_model("none")
    with pytest.raises(triton.InferenceServerException, match=r"parameters\.config: load does not take it"):
        triton_client.load_model("other", config="{}")


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
def running(thread: LoopThread, tmp_path: Path, mlp: Path) -> Iterator[Running]:
    with Running(thread, tmp_path, document(mlp)) as running:
        yield running


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
