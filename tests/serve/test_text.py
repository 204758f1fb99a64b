"""Text, BF16 and empty tensors through real worker processes, for the official Triton client over HTTP and gRPC."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sloop.errors import InputError
from tests.serve.edge.fakes import LoopThread
from tests.serve.edge.test_clients import grpc_client, http_client
from tests.serve.test_server import PROFILE, Running, document

pytestmark = pytest.mark.live

TOKENIZE = """
import numpy as np

class Model:
    inputs = {"text": ("BYTES", (-1,))}
    outputs = {"tokens": ("INT64", (-1, 2)), "half": ("BF16", (-1,))}
    joins_rows = True

    def __init__(self, threads): ...

    def run(self, text):
        lines = [each.decode() for each in text]
        # 1.0 is 0x3F80 as BF16, 2.0 is 0x4000
        half = np.array([0x3F80 if line.isascii() else 0x4000 for line in lines], np.uint16)
        return np.array([[len(line), line.count("a")] for line in lines], np.int64), half
"""
CLASSIFY = """
import numpy as np

class Model:
    inputs = {"tokens": ("INT64", (-1, 2)), "half": ("BF16", (-1,)), "text": ("BYTES", (-1,))}
    outputs = {"label": ("BYTES", (-1, 1)), "scores": ("FP32", (-1, 2)), "factor": ("BF16", (-1,))}
    joins_rows = True

    def __init__(self, threads): ...

    def run(self, tokens, half, text):
        names = [[f"{each.decode()}!"] for each in text]
        return np.array(names, dtype=object), tokens.astype(np.float32), half
"""
SPLIT = """
import numpy as np

class Model:
    inputs = {"text": ("BYTES", (1,))}
    outputs = {"words": ("BYTES", (-1,))}
    joins_rows = False

    def __init__(self, threads): ...

    def run(self, text):
        return np.array(text[0].split(), dtype=object)
"""
UPPER = """
import numpy as np

class Model:
    inputs = {"words": ("BYTES", (-1,))}
    outputs = {"upper": ("BYTES", (-1,))}
    joins_rows = True

    def __init__(self, threads): ...

    def run(self, words):
        return np.array([each.upper() for each in words], dtype=object)
"""
DOUBLE = """
class Model:
    inputs = {"x": ("FP32", (-1, -1))}
    outputs = {"y": ("FP32", (-1, -1))}
    joins_rows = True

    def __init__(self, threads): ...

    def run(self, x):
        return x * 2
"""

SLOW = DOUBLE.replace("        return", "        time.sleep(0.02)\n        return").replace(
    "\nclass", "\nimport time\nclass"
)


def written(folder: Path, **models: str) -> list[Path]:
    paths = [folder / f"{name}.py" for name in models]
    for path, text in zip(paths, models.values(), strict=True):
        path.write_text(text)
    return paths


def fan_out(folder: Path) -> dict[str, object]:
    split, upper = written(folder, split=SPLIT, upper=UPPER)
    stages = [
        {"name": "split", "variants": [{"name": "v", "model": str(split), "profile": PROFILE}]},
        {
            "name": "upper",
            "after": ["split"],
            "each": "words",
            "variants": [{"name": "v", "model": str(upper), "profile": PROFILE}],
        },
    ]
    return {**document(split), "name": "words", "stages": stages}


@pytest.fixture(scope="module")
def running(thread: LoopThread, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("text")
    (folder / "labels.txt").write_text("long\nfull of a\n")
    chain = document(*written(folder, tokenize=TOKENIZE, classify=CLASSIFY)) | {
        "name": "classify",
        "labels": {"scores": str(folder / "labels.txt")},
    }
    double = document(*written(folder, double=DOUBLE)) | {"name": "double"}
    share = {"system": {"name": "static", "replicas": 1, "cores": 0.2}}
    padded: Any = document(*written(folder, padded=SLOW)) | {"name": "padded"}
    padded["stages"][0]["variants"][0]["pad"] = {"x": -1}
    models = [each | share for each in (chain, fan_out(folder), double, padded)]
    with Running(thread, folder / "state", *models) as running:
        yield running


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, running: Running) -> Iterator[Any]:
    module = http_client if request.param == "http" else grpc_client
    port = running.server.http_port if request.param == "http" else running.server.grpc_port
    client = module.InferenceServerClient(f"127.0.0.1:{port}")
    yield module, client
    client.close()


def infer(client: Any, model: str, name: str, array: Any, *outputs: Any) -> Any:
    module, triton_client = client
    given = module.InferInput(name, array.shape, "BYTES" if array.dtype == object else "FP32")
    given.set_data_from_numpy(array)
    return triton_client.infer(model, [given], outputs=list(outputs) or None)


def texts(*lines: str) -> Any:
    return np.array([line.encode() for line in lines], dtype=object)


def test_text_goes_through_a_tokenizer_and_comes_back_as_labels(client: Any) -> None:
    result = infer(client, "classify", "text", texts("banana", "ä", ""))
    assert result.as_numpy("label").tolist() == [[b"banana!"], ["ä!".encode()], [b"!"]]
    assert result.as_numpy("scores").tolist() == [[6, 3], [1, 0], [0, 0]]
    assert result.as_numpy("factor").tolist() == [1, 2, 1]


def test_requests_with_texts_of_many_lengths_share_batches(running: Running) -> None:
    def labels(line: str) -> object:
        _, answer = running.ask("POST", "/v1/models/classify:predict", {"instances": [line, f"a{line}"]})
        return [row["label"] for row in json.loads(answer)["predictions"]]

    lines = ["x" * length for length in range(60)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(labels, lines)) == [[[f"{line}!"], [f"a{line}!"]] for line in lines]


def test_large_texts_go_through_shared_memory(client: Any) -> None:
    line = "a" * 300_000
    result = infer(client, "classify", "text", texts(line, "b"))
    assert result.as_numpy("label").tolist() == [[f"{line}!".encode()], [b"b!"]]


def test_classes_have_the_labels_of_the_application(client: Any) -> None:
    module, _ = client
    wanted = module.InferRequestedOutput("scores", class_count=1)
    result = infer(client, "classify", "text", texts("banana"), wanted)
    assert result.as_numpy("scores").tolist() == [[b"6.000000:0:long"]]


def test_rows_of_text_become_parts_and_are_joined(client: Any) -> None:
    result = infer(client, "words", "text", texts("one of many"))
    assert result.as_numpy("upper").tolist() == [b"ONE", b"OF", b"MANY"]
    assert infer(client, "words", "text", texts("")).as_numpy("upper").tolist() == []


def test_tensors_without_elements_are_served(client: Any) -> None:
    found = infer(client, "double", "x", np.zeros((3, 0), np.float32)).as_numpy("y")
    assert found.shape == (3, 0)
    assert infer(client, "double", "x", np.ones((1, 2), np.float32)).as_numpy("y").tolist() == [[2, 2]]


def test_rows_of_different_lengths_share_padded_passes_of_one_class(running: Running) -> None:
    def doubled(length: int) -> object:
        x = [float(length)] * length * 2
        given = {"name": "x", "shape": [2, length], "datatype": "FP32", "data": x}
        _, answer = running.ask("POST", "/v2/models/padded/infer", {"inputs": [given]})
        (output,) = json.loads(answer)["outputs"]
        return output["shape"], output["data"] == [2 * each for each in x]

    lengths = [*range(33, 49), *range(1, 5)] * 3
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(doubled, lengths)) == [([2, length], True) for length in lengths]
    _, text = running.ask("GET", "/metrics")
    found = {
        name: float(line.rpartition(b" ")[2])
        for line in text.splitlines()
        for name in ("batch_size_sum", "passes_total", "row_elements_total", "padding_elements_total")
        if line.startswith(f"sloop_{name}{{".encode()) and b'model="padded"' in line
    }
    assert found["batch_size_sum"] == 2 * len(lengths)
    assert found["row_elements_total"] == 2 * sum(lengths)
    assert 0 < found["padding_elements_total"] < found["row_elements_total"] / 2
    assert found["passes_total"] < len(lengths)


def test_a_request_of_many_rows_runs_in_pieces_and_comes_back_whole(client: Any) -> None:
    x = np.arange(2 * 100, dtype=np.float32).reshape(100, 2)
    assert infer(client, "double", "x", x).as_numpy("y").tolist() == (2 * x).tolist()
    lines = [f"{'a' * (each % 7)}{each}" for each in range(100)]
    result = infer(client, "classify", "text", texts(*lines))
    assert result.as_numpy("label").tolist() == [[f"{line}!".encode()] for line in lines]


def test_text_and_bfloats_in_json(running: Running) -> None:
    body = {"inputs": [{"name": "text", "shape": [2], "datatype": "BYTES", "data": ["banana", "ä"]}]}
    status, text = running.ask("POST", "/v2/models/classify/infer", body)
    assert status == 200, text
    for part in (b'"data":["banana!","\xc3\xa4!"]', b'"datatype":"BF16","shape":[2],"data":[1.0,2.0]'):
        assert part in text
    status, text = running.ask("POST", "/v1/models/words:predict", {"inputs": ["a b"]})
    assert text == b'{"outputs":["A","B"]}'


def test_labels_of_an_output_that_there_is_not_are_an_error(thread: LoopThread, tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("a\n")
    described = document(*written(tmp_path, double=DOUBLE)) | {"labels": {"z": str(tmp_path / "labels.txt")}}
    with pytest.raises(InputError, match=r"labels\.z: the application has no output 'z'\nhelp: its outputs are y"):
        Running(thread, tmp_path, described)
    (tmp_path / "labels.txt").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"labels\.y: the labels cannot be read"):
        Running(thread, tmp_path, described | {"labels": {"y": str(tmp_path / "labels.txt")}})
