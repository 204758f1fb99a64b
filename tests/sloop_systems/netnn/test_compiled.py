"""Files of compiled networks."""

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.random import RandomState

from sloop.errors import InputError, MachineError
from sloop_systems.netnn.compiled import CompiledNetwork, load, save
from sloop_systems.netnn.mapper import Fabric, NoCapacity
from sloop_systems.netnn.network import BYTES, Ints, Network
from sloop_systems.netnn.quantiser import quantise
from sloop_systems.netnn.training import Architecture


def _network(*, same: bool = False) -> Network:
    network = Architecture(24, (4, 3), (5,), kernel=3, pool=2, same=same).made(1)
    return quantise(network, RandomState(0).randint(0, 128, (20, 24)), inputs=BYTES)


@pytest.mark.parametrize("same", [False, True])
def test_what_was_saved_is_the_same_network_again(tmp_path: Path, same: bool) -> None:
    made = CompiledNetwork(_network(same=same), Fabric(slots=16, routing="three-tier"), 3, 40, in_kernel=True)
    path = tmp_path / "a.innet"
    save(made, path)
    found = load(path)
    assert found.fabric == made.fabric
    assert (found.version, found.doubt, found.in_kernel) == (3, 40, True)
    rows = RandomState(1).randint(0, 128, (10, 24))
    assert np.array_equal(found.network.run(rows), made.network.run(rows))
    assert found.program.copies == made.program.copies
    save(found, tmp_path / "b.innet")
    assert np.array_equal(load(tmp_path / "b.innet").network.run(rows), made.network.run(rows))


def test_doubt_is_about_the_distance_to_another_class() -> None:
    made = CompiledNetwork(_network(), Fabric(), doubt=10)
    assert made.is_doubtful(np.array([[-9], [0], [10], [-10]])).tolist() == [True, True, False, False]
    assert made.is_doubtful(np.array([[5, 14, 0], [5, 15, 0]])).tolist() == [True, False]


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.innet"
    with pytest.raises(InputError, match="cannot be read"):
        load(path)
    save(CompiledNetwork(_network(), Fabric()), path)
    whole = path.read_bytes()
    for content in (b"", b"onnx", whole[: len(whole) // 2], whole[:-4]):
        path.write_bytes(content)
        with pytest.raises(InputError, match="no compiled network, or truncated"):
            load(path)
    with path.open("wb") as file:
        np.savez(file, header=np.frombuffer(b'{"format": 2}', np.uint8))
    with pytest.raises(InputError, match="its format is 2"):
        load(path)
    with pytest.raises(MachineError, match="cannot write"):
        save(CompiledNetwork(_network(), Fabric()), tmp_path)


def test_no_damage_makes_another_network(tmp_path: Path) -> None:
    """Whatever bytes a file has, it is refused, or it is the same network."""
    whole, rows, logits = _saved_whole()
    path = tmp_path / "a.innet"
    kept = 0
    for place in range(0, len(whole), 3):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(bytes(damaged))
        try:
            found = load(path)
        except InputError:
            continue
        kept += 1
        assert np.array_equal(found.network.run(rows), logits), place
    assert kept < len(whole) / 6  # dates and attributes that the archive has of its parts


@cache
def _saved_whole() -> tuple[bytes, Ints, Ints]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.innet"
        save(CompiledNetwork(_network(), Fabric()), path)
        rows = RandomState(1).randint(0, 128, (10, 24))
        return path.read_bytes(), rows, _network().run(rows)


@pytest.mark.parametrize(
    ("changes", "order", "message"),
    [
        ({"shape": [24, 1, 0]}, None, "its input is 24 × 1 × 0"),
        ({"inputs": {"low": -128, "high": 127, "exponent": 7}}, None, "inputs from -128 to 127"),
        ({"layers.0.pool": [0, 1]}, None, "layer 'conv1': its pool"),
        ({"layers.0.shift": 31}, None, "its shift is 31"),
        ({"fabric.slots": 7}, None, "slots is 7"),
        ({}, [0] * 24, "the order of its inputs"),
    ],
)
def test_a_header_with_other_numbers_is_refused(
    tmp_path: Path, changes: dict[str, Any], order: list[int] | None, message: str
) -> None:
    path = tmp_path / "a.innet"
    save(CompiledNetwork(_network(), Fabric()), path)
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files}
    header = json.loads(arrays["header"].tobytes())
    for key, value in changes.items():
        place, *rest = key.split(".")
        inner = header
        for name in rest:
            inner, place = inner[int(place) if place.isdigit() else place], name
        inner[place] = value
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    if order is not None:
        arrays["order"] = np.array(order, np.int64)
    with path.open("wb") as file:
        np.savez(file, **arrays)
    with pytest.raises(InputError, match=message):
        load(path)


def test_a_network_that_does_not_fit_is_refused_when_it_is_compiled() -> None:
    with pytest.raises(NoCapacity, match="needs 5 leaves, the fabric has 2"):
        _ = CompiledNetwork(_network(), Fabric(leaves=2)).program
