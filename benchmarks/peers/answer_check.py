"""Checks that a server answers one request like ONNX Runtime itself. Other servers are not measured."""

from http.client import HTTPConnection, HTTPException
from math import prod

import numpy as np

from benchmarks.peers.peer import Ask, Model, PeerFailed
from sloop.profile.model import open_session
from sloop.streams import stream

TOLERANCE = 1e-3
"""Relative to the largest value: a batch takes other kernels."""
ANSWER_S_MAX = 30.0


def row_of(model: Model, seed: int) -> bytes:
    """The input of one request as raw FP32, generated from the seed."""
    drawn = np.frombuffer(stream(seed, "inputs").randbytes(prod(model.row)), dtype=np.uint8)
    return (drawn / np.float32(255)).astype(np.float32).tobytes()


def expected(model: Model, row: bytes) -> list[float]:
    """ONNX Runtime's answer."""
    session = open_session(model.path, 1)
    tensor = np.frombuffer(row, dtype=np.float32).reshape(1, *model.row)
    values: list[float] = np.asarray(session.run([model.output], {model.input: tensor})[0]).ravel().tolist()
    return values


def check(port: int, ask: Ask, wanted: list[float]) -> None:
    """PeerFailed if the server's answer is not the expected one."""
    connection = HTTPConnection("127.0.0.1", port, timeout=ANSWER_S_MAX)
    try:
        connection.request("POST", ask.path, ask.body, dict(ask.fields))
        answer = connection.getresponse()
        body, status = answer.read(), answer.status
        fields = {name.lower(): value for name, value in answer.getheaders()}
    except (OSError, HTTPException) as error:
        raise PeerFailed(f"no answer: {error!r}") from None
    finally:
        connection.close()
    if status != 200:
        raise PeerFailed(f"answered {status}: {body[:150].decode(errors='replace')}")
    try:
        found = np.asarray(ask.read(body, fields), dtype=np.float64)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise PeerFailed(f"not an answer ({error!r}): {body[:150].decode(errors='replace')}") from None
    scale = max(map(abs, wanted)) or 1.0
    if found.shape != (len(wanted),) or not np.allclose(found, wanted, rtol=0, atol=TOLERANCE * scale):
        raise PeerFailed(f"answered {found[:4].tolist()}…, not {wanted[:4]}…")
