import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from sloop.demo.live import Sending, is_ready, observe, serving
from sloop.errors import MachineError
from sloop.report.metrics import Metrics, fold
from sloop.runlog import read_log
from sloop.units import ms, s
from sloop.workload import trace_of

APPLICATION = """\
name: tiny
slo_ms: 20000
stages:
  - name: only
    model: tiny.onnx
    profile: {latency_ms: {form: quadratic, alpha: 0, beta: 0.1, gamma: 1}, max_batch: 4}
system: static
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    weights = numpy_helper.from_array(np.ones((4, 4), dtype=np.float32), "w")
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "tiny", ports[:1], ports[1:], [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.save(model, str(tmp_path / "tiny.onnx"))
    (tmp_path / "app.yaml").write_text(APPLICATION)
    return tmp_path / "app.yaml"


@pytest.mark.live
def test_clients_and_log_agree_and_the_server_is_gone(app: Path, tmp_path: Path) -> None:
    trace = trace_of([ms(20) * place for place in range(30)], duration_ns=s(1), name="x", provenance="assumed: a test")
    seen, log = observe(app, tmp_path / "state", Sending(trace, None, 0, 20_000, seed=1))
    assert seen.ok == 30
    assert sum(second.served for second in fold(read_log(log), Metrics()).seconds()) == 30
    lock = (tmp_path / "state" / "lock").read_text().strip()
    assert not Path(f"/proc/{lock}").exists() or os.getpid() == int(lock)


@pytest.mark.live
def test_a_server_that_does_not_start_is_quoted(app: Path, tmp_path: Path) -> None:
    app.write_text(app.read_text().replace("system: static", "system: statik"))
    with pytest.raises(MachineError, match="unknown system 'statik'"), serving(app, tmp_path / "state"):
        pass


def test_nobody_is_not_ready() -> None:
    assert not is_ready("http://127.0.0.1:1")
