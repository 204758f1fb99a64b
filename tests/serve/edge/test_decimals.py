"""Floats in their shortest form: as NumPy has it for one number, and for many at once."""

import json
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sloop.serve.edge.decimals import FEW_BYTES, KINDS, shortest
from sloop.serve.edge.inputs import listed, unpack
from sloop.tensor import Tensor, bfloats_of, bytes_of, floats_of


def written(datatype: str, array: NDArray[Any]) -> list[float]:
    found = unpack(Tensor(datatype, array.shape, bytes_of(array)))
    if len(array) > 1000:
        return found
    assert shortest(datatype, bytes_of(array)) == found, "few numbers are written as many are"
    return found


def singles(count: int) -> NDArray[np.float32]:
    """Of all magnitudes, those that are no numbers left out."""
    bits = np.random.default_rng(7).integers(0, 2**32, count, dtype=np.uint32).view(np.float32)
    return bits[np.isfinite(bits)]


COMMON = np.array([0.1, -0.1, 1 / 3, 1e-7, 0.0, -0.0, 1, 100, 1.5e9, 16777216, 1e-38, 1e-45, 3.4e38, 123456.7])
POWERS = 2.0 ** np.arange(-149, 128)


@pytest.mark.parametrize("count", [1, FEW_BYTES // 4, FEW_BYTES // 4 + 1, 20_000])
def test_of_32_bits_they_are_those_of_numpy(count: int) -> None:
    floats = np.resize(np.concatenate((COMMON, POWERS, singles(20_000))).astype("<f4"), count)
    found = written("FP32", floats)
    assert np.array(found).astype("<f4").tobytes() == floats.tobytes(), "they read back as the same numbers"
    assert [len(repr(each)) for each in found] == [len(repr(float(str(each)))) for each in floats]


def test_all_of_16_bits_are_those_of_numpy() -> None:
    every = np.arange(2**16, dtype=np.uint16).view("<f2")
    halves = every[np.isfinite(every)]
    found = written("FP16", halves)
    assert np.array(found).astype("<f2").tobytes() == halves.tobytes()
    assert found == [float(str(each)) for each in halves]


def test_all_bfloats_need_four_digits_at_most() -> None:
    every = np.arange(2**16, dtype="<u2")
    bits = every[np.isfinite(floats_of(every))]
    found = np.array(written("BF16", bits))
    assert bfloats_of(found.astype(np.float32)).tobytes() == bits.tobytes()
    assert all(float(f"{each:.3e}") == each for each in found)
    tenth = bfloats_of(np.array([0.1], np.float32))
    assert written("BF16", tenth) == [0.1]


@pytest.mark.parametrize("count", [3, 1000])
def test_numbers_that_are_not_finite_have_their_names(count: int) -> None:
    floats = np.resize(np.array([0.1, np.nan, -np.inf], "<f4"), count)
    elements = listed("y", Tensor("FP32", (count,), bytes_of(floats)))
    assert json.loads(json.dumps(elements[:3])) == [0.1, "NaN", "-Infinity"]


def test_of_64_bits_there_is_nothing_to_shorten() -> None:
    assert "FP64" not in KINDS
