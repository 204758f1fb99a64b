"""Training in NumPy: right gradients, rounding as a switch rounds, and files that others can read."""

from pathlib import Path

import numpy as np
import onnxruntime  # type: ignore[import-untyped]
import pytest
from numpy.random import RandomState

from sloop.errors import InputError
from sloop.onnx_file import write_onnx
from sloop_systems.netnn.network import BYTES, FloatNetwork
from sloop_systems.netnn.quantiser import quantise, read_network
from sloop_systems.netnn.training import (
    FLOW_MODEL,
    PACKET_MODEL,
    Architecture,
    LabelledRows,
    TrainingSchedule,
    _Trainer,
    fit,
)
from tests.sloop_systems.netnn.models import onnx_message

SMALL = Architecture(40, (12, 12), (16,), kernel=3, pool=2)
SAME = Architecture(12, (4, 4), (5,), pool=2, same=True)


def _task(count: int, inputs: int, seed: int = 0) -> LabelledRows:
    """Malicious if two of three bits are 1."""
    rows = RandomState(seed).randint(0, 2, (count, inputs))
    return LabelledRows(rows, rows[:, [2, 6, 10]].sum(axis=1) > 1)


@pytest.mark.parametrize("architecture", [SMALL, SAME])
def test_gradients_are_those_of_the_loss(architecture: Architecture) -> None:
    rows, labels = _task(6, architecture.inputs)
    rows = rows.astype(np.uint8)
    trainer = _Trainer(architecture.made(1), 1, np.float32(1))
    for layer in trainer._layers:  # no sum is exactly 0, where the ReLU has no gradient
        layer.bias += RandomState(2).uniform(0.05, 0.2, layer.bias.shape).astype(np.float32)
    gradients = {}

    def keep(layer: object, found: tuple[np.ndarray, ...]) -> None:
        gradients[id(layer)] = found

    trainer._adam = keep  # type: ignore[method-assign, assignment]
    trainer._step(rows, labels.astype(np.float32))
    for layer in trainer._layers:
        for value, gradient in zip((layer.weights, layer.bias), gradients[id(layer)], strict=True):
            flat = value.reshape(-1)
            for at in range(0, flat.size, max(1, flat.size // 7)):
                kept = flat[at]
                flat[at] = kept + 1e-3
                above = trainer.judge(rows, labels)[0]
                flat[at] = kept - 1e-3
                below = trainer.judge(rows, labels)[0]
                flat[at] = kept
                assert gradient.reshape(-1)[at] == pytest.approx((above - below) / 2e-3, abs=2e-3)


def test_it_learns_and_its_integers_lose_little() -> None:
    train, early, test = (_task(count, 40, seed) for count, seed in ((1600, 1), (300, 2), (600, 3)))
    made = fit(SMALL, train, early, seed=1)
    floats = float(((made.network.run(test.rows)[:, 0] >= 0) == test.labels).mean())
    integers = float(((made.integers().run(test.rows)[:, 0] >= 0) == test.labels).mean())
    assert floats > 0.7
    assert integers > floats - 0.03


def test_the_same_seed_trains_the_same_network() -> None:
    train, early = _task(300, 40, 1), _task(100, 40, 2)
    first, second = (fit(SMALL, train, early, seed=4, schedule=TrainingSchedule(2, 1)) for _ in range(2))
    assert np.array_equal(first.network.run(early.rows), second.network.run(early.rows))


def test_trained_weights_pass_the_quantiser_unchanged_and_trained_activations_are_its_integers() -> None:
    """What training rounded is what a switch computes."""
    train, early = _task(400, 40, 1), _task(100, 40, 2)
    made = fit(SMALL, train, early, seed=2, schedule=TrainingSchedule(3, 2))
    network = made.integers()
    right = ((network.run(early.rows)[:, 0] >= 0) == early.labels).mean()
    assert right == pytest.approx(made.validation)
    for integers, floats in zip(network.layers, made.network.layers, strict=True):
        ratio = integers.weights[floats.weights != 0] / floats.weights[floats.weights != 0]
        assert len(np.unique(ratio)) == 1  # one power of two
        assert 64 <= np.abs(integers.weights).max() <= 127


def test_bytes_as_inputs() -> None:
    rows = RandomState(1).randint(0, 128, (2000, 40))
    labels = rows[:, 5] > 64
    data = LabelledRows(rows, labels)
    made = fit(SMALL, data, data, seed=1, inputs=BYTES)
    assert ((made.integers().run(rows)[:, 0] >= 0) == labels).mean() > 0.85


def test_one_class_or_nothing_to_validate_with_is_refused() -> None:
    rows, labels = _task(20, 40)
    for train, early in (((rows, labels > 1), (rows, labels)), ((rows, labels), (rows[:0], labels[:0]))):
        with pytest.raises(InputError, match="both classes"):
            fit(SMALL, LabelledRows(*train), LabelledRows(*early))


def test_the_published_architectures() -> None:
    flow, packet = FLOW_MODEL.made(0), PACKET_MODEL.made(0)
    assert [shape[0] for shape in flow.shapes[:3]] == [814, 162, 31]
    assert _parameters(flow) == 114_947
    assert _parameters(packet) == 178_243


def _parameters(network: FloatNetwork) -> int:
    return sum(layer.weights.size + layer.bias.size for layer in network.layers)


@pytest.mark.parametrize("architecture", [SMALL, SAME, Architecture(12, (), (5,))])
def test_its_onnx_file_is_the_same_network_elsewhere(architecture: Architecture, tmp_path: Path) -> None:
    network = architecture.made(3)
    path = tmp_path / "model.onnx"
    write_onnx(onnx_message(network), path)
    rows = RandomState(0).randint(0, 2, (9, architecture.inputs))
    expected = network.run(rows)
    session = onnxruntime.InferenceSession(str(path))
    assert np.allclose(session.run(None, {"features": rows.astype(np.float32)})[0], expected, atol=1e-5)
    assert np.allclose(read_network(path).run(rows), expected, atol=1e-5)
    assert quantise(path, rows).run(rows).shape == (9, 1)
