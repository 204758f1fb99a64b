from collections.abc import Generator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from sloop.errors import InputError, MachineError
from sloop.profile import paying
from sloop.profile.measure import by_affinity
from sloop.profile.paying import BATCH_MAX, paying_batches
from sloop.profile.sample import Sample

onnx = pytest.importorskip("onnx")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    ports = [onnx.helper.make_tensor_value_info(name, 1, ["n", 4]) for name in ("x", "y")]
    weights = onnx.numpy_helper.from_array(np.ones((4, 4), dtype=np.float32), "w")
    node = onnx.helper.make_node("MatMul", ["x", "w"], ["y"])
    graph = onnx.helper.make_graph([node], "g", ports[:1], ports[1:], [weights])
    opset = onnx.helper.make_opsetid("", 13)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=8), str(tmp_path / "m.onnx"))
    return tmp_path / "m.onnx"


def looked(monkeypatch: pytest.MonkeyPatch, model: Path, rates: Sequence[float | Exception]) -> tuple[int, ...]:
    """The sizes chosen where batches of 8, 16, … run at these rates."""

    def looks(*_: object, **__: object) -> Generator[Sample, None, None]:
        for power, rate in enumerate(rates):
            if isinstance(rate, Exception):
                raise rate
            batch = 8 << power
            yield Sample(batch, 1.0, 1e3 * batch / rate, 1e3 * batch / rate, 5)

    monkeypatch.setattr(paying, "measure_on", looks)
    return paying_batches(model, cores=1.0, shapes={}, limit=by_affinity)


@pytest.mark.parametrize(
    ("rates", "chosen"),
    [
        ([100, 100, 900, 900], (1, 2, 4, 8)),
        ([100, 109], (1, 2, 4, 8)),
        ([100, 150, 160], (1, 2, 4, 8, 16)),
        ([100, 200, 300, 400], (1, 2, 4, 8, 16, 32, 64)),
        ([100, 200, InputError("refused")], (1, 2, 4, 8, 16)),
        ([MachineError("out of memory")], (1, 2, 4, 8)),
    ],
)
def test_doubles_while_that_brings_a_tenth_more(
    monkeypatch: pytest.MonkeyPatch, model: Path, rates: list[float | Exception], chosen: tuple[int, ...]
) -> None:
    assert looked(monkeypatch, model, rates) == chosen


def test_a_real_model_is_looked_at(model: Path) -> None:
    chosen = paying_batches(model, cores=1.0, shapes={}, limit=by_affinity)
    assert chosen[:4] == (1, 2, 4, 8)
    assert all(larger == 2 * smaller for smaller, larger in pairwise(chosen))
    assert chosen[-1] <= BATCH_MAX


def test_a_model_that_cannot_be_run_is_left_to_whoever_measures_it(tmp_path: Path) -> None:
    assert paying_batches(tmp_path / "nowhere.onnx", cores=1.0, shapes={}, limit=by_affinity) == (1, 2, 4, 8)
