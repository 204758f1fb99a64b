"""The integer network: the specification's test vectors (section 9.1), and a slow reference for everything else."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.errors import InputError
from sloop_systems.netnn.network import SIGNED, Convolution, Dense, Network, classify
from tests.sloop_systems.netnn.models import (
    bits,
    drawn,
    flow_model,
    model,
    picture_model,
    rows_of,
    slow_logits,
    small_model,
    weights,
)


def test_the_generator_of_the_vectors() -> None:
    assert weights(1, 5).tolist() == [107, -87, 75, -30, 43]
    assert weights(2, 4).tolist() == [104, 20, -35, -56]
    assert (drawn(3, 101).astype(np.int64) % 2001 - 1000).tolist() == [-446, -464, 350]
    assert bits(0, 16).tolist() == [1, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("network", "ones", "logits", "sums", "sizes"),
    [
        (
            *(flow_model(), [433, 443, 414, 418], [857, -1070, 2246, -1054]),
            *([104_267, 18_130, 327, 2_288], (114_947, 1_821_100)),
        ),
        (
            *(small_model(), [35, 31, 28, 33], [5804, 5746, 5155, 5359]),
            *([3_099, 1_013, 160, 277], (625, 5_536)),
        ),
    ],
    ids=["flow", "small"],
)
def test_vectors(network: Network, ones: list[int], logits: list[int], sums: list[int], sizes: tuple[int, int]) -> None:
    rows = rows_of(network, 4)
    assert rows.sum(axis=1).tolist() == ones
    assert network.run(rows).ravel().tolist() == logits
    assert [int(layer[0].sum()) for layer in network.activations(rows)[:-1]] == sums
    assert (network.parameters, network.products) == sizes
    assert classify(network.run(rows)).tolist() == [int(logit >= 0) for logit in logits]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 1000),
    st.sampled_from([((7, 3, 2),), ((3, 1, 1), (2, 3, 3)), ((4, 2, 1), (5, 2, 2))]),
    st.sampled_from([(1,), (3, 1), (4, 2)]),
)
def test_equals_a_slow_reference(
    seed: int, convolutions: tuple[tuple[int, int, int], ...], dense: tuple[int, ...]
) -> None:
    shifts = [3] + [8] * (len(convolutions) + len(dense) - 2)
    network = model(23, convolutions, dense, shifts, seed)
    for row in rows_of(network, 2, seed):
        assert network.run(row)[0].tolist() == slow_logits(network, row)


@pytest.mark.parametrize("seed", range(3))
def test_pictures_with_padding_equal_a_slow_reference(seed: int) -> None:
    network = picture_model(seed=seed, inputs=SIGNED)
    rows = np.random.default_rng(seed).integers(-127, 128, (3, network.input_count))
    assert network.run(rows).tolist() == [slow_logits(network, row) for row in rows]


def test_rows_may_come_in_another_order() -> None:
    network = picture_model()
    rows = np.random.default_rng(1).integers(0, 2, (4, 2, 9, 8))  # channels first
    order = np.arange(144).reshape(2, 9, 8).transpose(1, 2, 0).ravel()
    channels_first = Network(network.shape, network.layers, network.inputs, order)
    assert (channels_first.run(rows) == network.run(rows.transpose(0, 2, 3, 1))).all()


def test_largest_class_and_the_first_of_equals() -> None:
    assert classify(np.array([[1, 5, 5], [9, 0, 0]])).tolist() == [1, 0]
    assert classify(np.array([[0], [-1]])).tolist() == [1, 0]


def dense(*shape: int, name: str = "dense1", shift: int = 0, value: int = 1) -> Dense:
    return Dense(name, np.full(shape, value, np.int8), np.zeros(shape[0], np.int32), shift)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((dense(2, 7),), "layer 'dense1': it has weights for 7 inputs and gets 8"),
        ((Convolution("c", np.ones((1, 9, 1, 1), np.int8), np.zeros(1, np.int32)), dense(1, 1)), "no complete pooling"),
        (
            (Convolution("c", np.ones((1, 3, 1, 2), np.int8), np.zeros(1, np.int32)), dense(1, 1)),
            "2 channels and its input 1",
        ),
        ((Convolution("c", np.ones((1, 3, 1, 1), np.int8), np.zeros(1, np.int32)),), "does not end in a dense layer"),
        ((dense(2, 8), Convolution("c", np.ones((1, 1, 1, 2), np.int8), np.zeros(1, np.int32))), "after a dense layer"),
        ((dense(2, 8, value=-128),), "outside -127..127"),
        ((dense(2, 8, shift=31), dense(1, 2)), "its shift is 31"),
        ((Dense("d", np.ones((1, 8), np.float32), np.zeros(1, np.float32)),), "quantise the network first"),
        ((Dense("d", np.ones((1, 8), np.int8), np.full(1, 2**31 - 10, np.int32)),), "more than 32 bits"),
        ((Dense("d", np.ones((2, 8), np.int8), np.zeros(1, np.int32)),), "biases of shape"),
        ((), "does not end"),
    ],
)
def test_layers_that_do_not_fit(layers: tuple[Dense | Convolution, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Network((8, 1, 1), layers)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.zeros((2, 59), int), "a row has 59 inputs, the network 60"),
        (np.full((1, 60), 2), "a feature is 2; the network takes 0 to 1"),
        (np.zeros((1, 60)), "give integers"),
    ],
)
def test_wrong_rows(rows: np.ndarray, message: str) -> None:
    with pytest.raises(InputError, match=message):
        small_model().run(rows)
