"""Small ONNX models, made on the spot."""

import asyncio
from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import uvloop

from sloop.serve.weights.peers import FileServer
from tests.onnx_graphs import save_model
from tests.serve.bad_store import BadStore
from tests.serve.edge.fakes import LoopThread


def write_mlp(
    path: Path, rows: int | str, *, names: tuple[str, str] = ("x", "y"), width: int = 4, inner: int = 32
) -> Path:
    """out[rows, 3] = relu(in[rows, width] · A) · B, with weights drawn from a fixed seed."""
    chance, (given, answer) = np.random.default_rng(7), names
    shapes = {"a": (width, inner), "b": (inner, 3)}
    weights = {name: chance.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    ports = f"(float[{rows}, {width}] {given}) => (float[{rows}, 3] {answer})"
    nodes = f"h = MatMul({given}, a) r = Relu(h) {answer} = MatMul(r, b)"
    return save_model(path, f"{ports} {{ {nodes} }}", weights)


@pytest.fixture(scope="session")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with an open first dimension."""
    return write_mlp(tmp_path_factory.mktemp("models") / "mlp.onnx", "rows")


@pytest.fixture(scope="session")
def tail(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes what the first one gives."""
    return write_mlp(tmp_path_factory.mktemp("models") / "tail.onnx", "rows", names=("y", "z"), width=3)


@pytest.fixture(scope="session")
def mlp_of_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model for one row only."""
    return write_mlp(tmp_path_factory.mktemp("models") / "mlp1.onnx", 1)


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def event_loop(request: pytest.FixtureRequest) -> Callable[[], AbstractEventLoop]:
    """A test that uses it, and is a coroutine, runs on both event loops."""
    made: Callable[[], AbstractEventLoop] = request.param
    return made


@pytest.fixture(scope="module")
def thread() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


@pytest.fixture
def store() -> Iterator[BadStore]:
    with BadStore() as made:
        yield made


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From where on any machine or agent was asked for a file that it has."""
    found: list[int] = []
    before = FileServer._send

    async def noted(self: FileServer, writer: asyncio.StreamWriter, fd: int, at: int, end: int) -> bool:
        found.append(at)
        return await before(self, writer, fd, at, end)

    monkeypatch.setattr(FileServer, "_send", noted)
    return found
