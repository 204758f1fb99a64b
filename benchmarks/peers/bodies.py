"""Requests and answers as bytes: the Open Inference Protocol, plain JSON, raw bodies, uploaded files."""

import base64
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np

from benchmarks.peers.peer import Ask, Case, Encoding

JSON: Final = {"content-type": "application/json"}
OCTETS: Final = {"content-type": "application/octet-stream"}
BOUNDARY: Final = "tensor-boundary"


def oip(case: Case, row: bytes, name: str) -> Ask:
    """The Open Inference Protocol v2 for the model `name`, with the binary extension if `binary`."""
    entry: dict[str, Any] = {"name": case.model.input, "datatype": "FP32", "shape": [1, *case.model.row]}
    path = f"/v2/models/{name}/infer"
    if case.encoding is Encoding.JSON:
        entry["data"] = floats(row)
        return Ask(path, JSON, msgspec.json.encode({"inputs": [entry]}), read_oip)
    entry["parameters"] = {"binary_data_size": len(row)}
    head = msgspec.json.encode({"inputs": [entry], "parameters": {"binary_data_output": True}})
    return Ask(path, OCTETS | {"inference-header-content-length": str(len(head))}, head + row, read_oip_binary)


def oip_base64(case: Case, row: bytes, name: str) -> Ask:
    """The same in JSON with the tensor's bytes in base64, for servers without the binary extension."""
    data = [base64.b64encode(row).decode()]
    entry = {"name": case.model.input, "datatype": "BYTES", "shape": [1], "data": data}
    content = entry | {"parameters": {"content_type": "base64"}}
    return Ask(f"/v2/models/{name}/infer", JSON, msgspec.json.encode({"inputs": [content]}), read_oip)


def plain_json(path: str, case: Case, row: bytes, *, batched: bool = False) -> Ask:
    """`{"x": [...]}`, answered by `{"y": [...]}`; if `batched`, both tensors have their first dimension."""
    tensor = np.array(floats(row)).reshape(1, *case.model.row)
    content = tensor.tolist() if batched else tensor[0].tolist()
    return Ask(path, JSON, msgspec.json.encode({"x": content}), read_batched if batched else read_plain)


def raw(path: str, row: bytes) -> Ask:
    """The raw tensor as the body, in both directions."""
    return Ask(path, OCTETS, row, read_raw)


def uploaded(path: str, row: bytes, *, batched: bool = False) -> Ask:
    """The tensor as a file `x` in a form; if `batched`, the answer is JSON."""
    head = f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="x"; filename="x"\r\n'
    body = head.encode() + b"content-type: application/octet-stream\r\n\r\n" + row + f"\r\n--{BOUNDARY}--\r\n".encode()
    fields = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
    return Ask(path, fields, body, read_batched if batched else read_raw)


def floats(row: bytes) -> list[float]:
    """The numbers of a raw FP32 tensor, to as many digits as FP32 has."""
    return [float(f"{value:.7g}") for value in np.frombuffer(row, dtype=np.float32).tolist()]


def _flat(values: object) -> list[float]:
    flat: list[float] = np.asarray(values, dtype=np.float64).ravel().tolist()
    return flat


def read_oip(body: bytes, fields: Mapping[str, str]) -> list[float]:
    return _flat(msgspec.json.decode(body)["outputs"][0]["data"])


def read_oip_binary(body: bytes, fields: Mapping[str, str]) -> list[float]:
    return _flat(np.frombuffer(body[int(fields["inference-header-content-length"]) :], dtype=np.float32))


def read_plain(body: bytes, fields: Mapping[str, str]) -> list[float]:
    return _flat(msgspec.json.decode(body)["y"])


def read_batched(body: bytes, fields: Mapping[str, str]) -> list[float]:
    return _flat(msgspec.json.decode(body))


def read_raw(body: bytes, fields: Mapping[str, str]) -> list[float]:
    return _flat(np.frombuffer(body, dtype=np.float32))
