"""The table of peers: names, programs, requests and limits that hold together, without starting any."""

import json
from pathlib import Path

import pytest

from benchmarks.peers.__main__ import chosen
from benchmarks.peers.peer import PROGRAMS, SETTINGS, Case, Encoding, Model, Peer, Tuning
from benchmarks.peers.servers import OPEN_PEERS, PEERS

MODEL = Model(Path("m.onnx"), "x", "y", (16,), (8,))
ROW = bytes(64)


@pytest.fixture(params=[peer for peer in OPEN_PEERS if peer.environment.packages], ids=lambda peer: str(peer.name))
def peer(request: pytest.FixtureRequest) -> Peer:
    found: Peer = request.param
    return found


def first(peer: Peer) -> Tuning:
    return next(iter(peer.tunings.values()))


def test_packages_are_pinned(peer: Peer) -> None:
    assert all("==" in package for package in peer.environment.packages)


def test_each_limit_reaches_its_server(peer: Peer, tmp_path: Path) -> None:
    for limits in peer.limits(100, 150.0).values():
        case = Case(MODEL, Encoding.BINARY, 8, 150.0, tmp_path, first(peer), limits)
        launch = peer.launch(case, Path("python"), 8000)
        told = " ".join((*launch.command, launch.variables[SETTINGS]))
        assert all(name in told for name in limits)
        assert "8000" in told


def test_each_tuning_reaches_its_server(peer: Peer, tmp_path: Path) -> None:
    launches: set[str] = set()
    for tuning in peer.tunings.values():
        launch = peer.launch(Case(MODEL, Encoding.BINARY, 8, 150.0, tmp_path, tuning), Path("python"), 8000)
        written = (path.read_text() for path in sorted(tmp_path.rglob("*.json")) if "port" not in path.read_text())
        told = json.loads(launch.variables[SETTINGS])
        told["options"].pop("metrics_port", None)
        launches.add(" ".join((*launch.command, json.dumps(told), *written)))
    assert len(launches) == len(peer.tunings)


def test_its_program_is_there(peer: Peer, tmp_path: Path) -> None:
    launch = peer.launch(Case(MODEL, Encoding.BINARY, 8, 150.0, tmp_path, first(peer)), Path("python"), 8000)
    programs = {path.name.removesuffix(".py") for path in PROGRAMS.glob("*_program.py")}
    model = tmp_path / "mlserver" / "model-settings.json"
    named = " ".join((*launch.command, model.read_text() if model.exists() else ""))
    assert [name for name in programs if name in named]


def test_every_encoding_has_a_request(peer: Peer, tmp_path: Path) -> None:
    bodies = {peer.ask(Case(MODEL, form, 8, 150.0, tmp_path, first(peer)), ROW).body for form in peer.encodings}
    assert len(bodies) == len(peer.encodings)


def test_peers_are_chosen_by_environment() -> None:
    assert [peer.name for peer in chosen("mosec,sloop", PEERS)] == ["sloop", "mosec", "mosec, msgspec"]
    assert chosen("", PEERS) == list(PEERS)
    with pytest.raises(SystemExit, match="no peer torchserve; known: sloop, mosec"):
        chosen("torchserve", PEERS)
