"""Measuring layers: every block has its numbers, and a chain that differs is refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from msgspec import structs
from onnx import helper, numpy_helper

from benchmarks.models import convolutions, perceptron
from sloop.errors import InputError, MachineError
from sloop.profile import layers as module
from sloop.profile.layers import (
    CutCheck,
    LayersLoad,
    LayersOrder,
    RoundTimes,
    measure_here,
    measure_layers,
    move_ms_per_mb,
)
from sloop.profile.measure import by_affinity
from sloop.profile.onnx_cut import cut_model
from sloop.profile.profile import Profile, Quadratic, digest_of_model, load_profile, save_profile


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return perceptron(tmp_path, width=16, layers=2)


def brief(model: Path, **more: Any) -> Any:
    return measure_layers(model, batches=[1, 4], cores=[1], seconds=0.01, passes=1, **more)


def test_measures_every_block(model: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    found = brief(model, progress=lambda *each: seen.append(each))
    assert [each.end for each in found.blocks] == ["r0", "r1", "y"]
    assert [each.operators for each in found.blocks] == ["MatMul, Relu", "MatMul, Relu", "MatMul, Identity"]
    assert [each.param_bytes for each in found.blocks] == [4 * 16 * 16, 4 * 16 * 16, 4 * 16 * 10]
    assert [each.output_bytes for each in found.blocks] == [64, 64, 40], "of one row, whatever the batch"
    assert [each.crossing_bytes for each in found.blocks] == [64, 64, 40]
    assert found.input_bytes == 64
    for each in (found, *found.blocks):
        assert sorted(each.latency_ms.table) == [1, 4]
        assert all(ms > 0 for row in each.latency_ms.table.values() for ms in row.values())
        assert each.load_ms > 0
    assert found.difference <= module.DIFFERENCE_MAX
    assert found.origin == "measured"
    assert found.hardware
    assert found.date
    assert "ONNX Runtime" in found.software
    assert found.model_digest == digest_of_model(model)
    assert [(done, cells) for done, cells, _ in seen] == [(1, 2), (2, 2)]
    assert seen[0][2] == "3 blocks, batch 1 on 1 core"
    assert list(tmp_path.iterdir()) == [model], "nothing is left behind"

    profile = Profile(latency_ms=Quadratic(0, 1, 1), max_batch=4, max_cores=1, layers=found)
    save_profile(profile, tmp_path / "m.profile.json")
    assert load_profile(tmp_path / "m.profile.json").layers == found


def test_cuts_where_it_is_asked_to_and_keeps_the_pieces(model: Path, tmp_path: Path) -> None:
    found = brief(model, cuts=["r0"], folder=tmp_path / "kept")
    assert [each.layers for each in found.blocks] == [2, 4]
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == [
        f"{model.stem}.{number}-of-2.onnx" for number in (1, 2)
    ]
    with pytest.raises(InputError, match="it cannot be cut after 'nowhere'"):
        brief(model, cuts=["nowhere"])


def test_passing_tensors_count_at_every_boundary_they_cross(tmp_path: Path) -> None:
    """An input that the last block reads crosses all boundaries, but no block makes it."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("MatMul", ["a", "w"], ["b"]),
        helper.make_node("Add", ["b", "x"], ["y"]),
    ]
    ports = [helper.make_tensor_value_info(name, 1, ["n", 8]) for name in "xy"]
    weights = numpy_helper.from_array(np.eye(8, dtype=np.float32), "w")
    graph = helper.make_graph(nodes, "g", ports[:1], ports[1:], [weights])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
    found = brief(path, cuts=["a"])
    assert [(each.output_bytes, each.crossing_bytes) for each in found.blocks] == [(32, 64), (32, 32)]


def test_refuses_pieces_that_give_other_results(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = cut_model(model, None, tmp_path)
    order = LayersOrder(str(model), pieces, 1, (1,), {}, 0.001)
    rounds, load = measure_here(order)
    assert isinstance(rounds, RoundTimes)
    assert isinstance(load, LayersLoad)
    monkeypatch.setattr(module, "_measured", lambda *_: iter([rounds, structs.replace(load, difference=0.5)]))
    with pytest.raises(InputError, match=r"in pieces it gives other results: they differ by 5.0e-01") as raised:
        brief(model, cuts=["r0", "r1"])
    assert "cut elsewhere" in raised.value.help


def test_leaves_out_boundaries_that_change_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five boundaries the second changes the results alone, and the fourth and fifth together."""
    model = perceptron(tmp_path, width=8, layers=5)
    alone = {"r0": 0.0, "r1": 2e-6, "r2": 0.0, "r3": 6e-7, "r4": 7e-7}
    checked: list[list[str]] = []

    def check(order: LayersOrder, *_: object) -> Iterator[CutCheck]:
        assert order.is_check
        ends = [piece.layers[-1] for piece in order.pieces[:-1]]
        checked.append(ends)
        yield CutCheck(sum(alone[end] for end in ends))

    order = LayersOrder(str(model), (), 1, (1,), {}, 0.001)
    monkeypatch.setattr(module, "_measured", check)
    pieces = module._exact_pieces(order, 1.0, by_affinity, tmp_path)
    assert [piece.layers[-1] for piece in pieces] == ["r0", "r2", "r3", "y"]
    assert len(checked) == 1 + 5 + 2, "all, each alone once, and what is left"
    assert sum(path.suffix == ".onnx" for path in tmp_path.iterdir()) == 5, "the model and its pieces"


def test_a_check_compares_only(model: Path, tmp_path: Path) -> None:
    pieces = cut_model(model, None, tmp_path)
    found = list(measure_here(LayersOrder(str(model), pieces, 1, (1, 4), {}, 60.0, is_check=True)))
    assert found == [CutCheck(0.0)]


def test_refuses_what_cannot_be_cut_or_run(tmp_path: Path) -> None:
    python = tmp_path / "model.py"
    python.write_text("class Model: ...")
    with pytest.raises(InputError, match="only an ONNX model has a graph of layers"):
        brief(python)
    ids = helper.make_tensor_value_info("x", 7, ["n", 1])
    nodes = [
        helper.make_node("Gather", ["table", "x"], ["a"]),
        helper.make_node("Reshape", ["a", "shape"], ["b"]),
        helper.make_node("Relu", ["b"], ["y"]),
    ]
    weights = [
        numpy_helper.from_array(np.ones((2, 4), np.float32), "table"),
        numpy_helper.from_array(np.array([1, 4], np.int64), "shape"),
    ]
    graph = helper.make_graph(nodes, "g", [ids], [helper.make_tensor_value_info("y", 1, ["n", 4])], weights)
    path = tmp_path / "one.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
    with pytest.raises(InputError, match="a batch of 4 fails") as raised:
        brief(path, cuts=["b"])
    assert str(path) in str(raised.value)


def test_says_why_the_measured_process_died(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(model.parent))
    (model.parent / "sitecustomize.py").write_text("raise SystemExit('out of order')")
    with pytest.raises(MachineError, match="the measured process ended before it began"):
        brief(model)


def test_moving_bytes_takes_time() -> None:
    assert move_ms_per_mb() > 0


def test_convolutions_weigh_little_at_first(tmp_path: Path) -> None:
    found = brief(convolutions(tmp_path, channels=4, layers=3, pixels=8))
    sizes = [each.param_bytes for each in found.blocks]
    assert sizes == sorted(sizes[:3]) + sizes[3:]
    assert found.blocks[0].crossing_bytes == 4 * 4 * 8 * 8
