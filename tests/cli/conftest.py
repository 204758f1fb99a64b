"""An application that needs nothing but its file, and a model that takes no time."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import pytest

from sloop.cli import main
from tests.onnx_graphs import save_model

APPLICATION = """\
name: demo
slo_ms: 1000
stages:
  - name: classify
    profile: ResNet-T
system: {name: static, cores: 8}
cluster: {nodes: [{hardware: c5.4xlarge, count: 2}]}
"""

SERVED = """\
name: tiny
slo_ms: 1000
stages:
  - name: only
    model: tiny.onnx
    profile: {latency_ms: {form: quadratic, alpha: 0, beta: 0.1, gamma: 1}, max_batch: 4}
system: static
"""


@pytest.fixture(autouse=True)
def free_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve` without ports takes free ones here: others on this machine may hold the usual ones."""
    command = main.get_command(click.Context(main), "serve")
    assert command is not None
    for option in command.params:
        if option.name in ("http_port", "grpc_port"):
            monkeypatch.setattr(option, "default", 0)


@pytest.fixture
def app(tmp_path: Path) -> Path:
    path = tmp_path / "app.yaml"
    path.write_text(APPLICATION)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_small_model(tmp_path / "tiny.onnx")


def save_small_model(path: Path) -> Path:
    """One matrix multiplication with an open batch."""
    graph = "(float[n, 4] x) => (float[n, 4] y) { y = MatMul(x, w) }"
    return save_model(path, graph, {"w": np.ones((4, 4), np.float32)})


@pytest.fixture
def server(model: Path) -> Iterator["subprocess.Popen[str]"]:
    (model.parent / "tiny.yaml").write_text(SERVED)
    command = [sys.executable, "-m", "sloop", "serve", "tiny.yaml", "--http-port", "0", "--grpc-port", "0", "--json"]
    with subprocess.Popen(
        command, cwd=model.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()
