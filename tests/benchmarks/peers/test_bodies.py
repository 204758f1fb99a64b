"""Every form of a request carries the same tensor, and its answer is read back."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from benchmarks.peers.bodies import oip, oip_base64, plain_json, raw, uploaded
from benchmarks.peers.load import head_of
from benchmarks.peers.peer import Case, Encoding, Model

MODEL = Model(Path("m.onnx"), "x", "y", (2, 2), (3,))
ROW = np.array([0.5, 0.1, 2, 3], dtype=np.float32).tobytes()
ANSWER = np.array([1, 2, 3], dtype=np.float32).tobytes()


def case(encoding: Encoding) -> Case:
    return Case(MODEL, encoding, 8, 100.0, Path(), {})


def test_open_inference_protocol() -> None:
    ask = oip(case(Encoding.JSON), ROW, "m")
    sent = msgspec.json.decode(ask.body)["inputs"][0]
    assert (sent["shape"], sent["data"]) == ([1, 2, 2], [0.5, 0.1, 2.0, 3.0])
    assert ask.read(b'{"outputs": [{"data": [[1, 2, 3]]}]}', {}) == [1, 2, 3]


def test_binary_extension() -> None:
    ask = oip(case(Encoding.BINARY), ROW, "m")
    head_bytes = int(ask.fields["inference-header-content-length"])
    assert ask.body[head_bytes:] == ROW
    assert msgspec.json.decode(ask.body[:head_bytes])["inputs"][0]["parameters"]["binary_data_size"] == len(ROW)
    assert ask.read(b"{}" + ANSWER, {"inference-header-content-length": "2"}) == [1, 2, 3]


@pytest.mark.parametrize("batched", [False, True])
def test_plain_forms(batched: bool) -> None:
    ask = plain_json("/", case(Encoding.JSON), ROW, batched=batched)
    sent = [[0.5, 0.1], [2, 3]]
    assert msgspec.json.decode(ask.body)["x"] == ([sent] if batched else sent)
    assert ask.read(b"[[1, 2, 3]]" if batched else b'{"y": [1, 2, 3]}', {}) == [1, 2, 3]


def test_bytes_as_they_are_in_a_form_and_as_base64() -> None:
    assert raw("/", ROW).body == ROW
    assert ROW in uploaded("/", ROW).body
    assert b'"BYTES"' in oip_base64(case(Encoding.BINARY), ROW, "m").body
    assert raw("/", ROW).read(ANSWER, {}) == [1, 2, 3]


def test_a_head_says_what_follows() -> None:
    head = head_of(80, raw("/predict", ROW))
    assert head.startswith("POST /predict HTTP/1.1\r\n")
    assert f"content-length: {len(ROW)}\r\n" in head
    assert head.endswith("\r\n\r\n")
