"""The table of peers: names, programs, requests and limits that hold together, without starting any."""

from pathlib import Path

import pytest

from benchmarks.peers.__main__ import chosen
from benchmarks.peers.peer import PROGRAMS, SETTINGS, Case, Encoding, Model, Peer
from benchmarks.peers.servers import OPEN_PEERS, PEERS

MODEL = Model(Path("m.onnx"), "x", "y", (16,), (8,))
ROW = bytes(64)


@pytest.fixture(params=[peer for peer in OPEN_PEERS if peer.environment.packages], ids=lambda peer: str(peer.name))
def peer(request: pytest.FixtureRequest) -> Peer:
    found: Peer = request.param
    return found


def test_packages_are_pinned(peer: Peer) -> None:
    assert all("==" in package for package in peer.environment.packages)


def test_each_limit_reaches_its_server(peer: Peer, tmp_path: Path) -> None:
    for limits in peer.limits(100, 150.0).values():
        case = Case(MODEL, Encoding.BINARY, 8, 150.0, tmp_path, limits)
        launch = peer.launch(case, Path("python"), 8000)
        told = " ".join((*launch.command, launch.variables[SETTINGS]))
        assert all(name in told for name in limits)
        assert "8000" in told


def test_its_program_is_there(peer: Peer, tmp_path: Path) -> None:
    launch = peer.launch(Case(MODEL, Encoding.BINARY, 8, 150.0, tmp_path), Path("python"), 8000)
    programs = {path.name.removesuffix(".py") for path in PROGRAMS.glob("*_program.py")}
    model = tmp_path / "mlserver" / "model-settings.json"
    named = " ".join((*launch.command, model.read_text() if model.exists() else ""))
    assert [name for name in programs if name in named]


def test_every_encoding_has_a_request(peer: Peer, tmp_path: Path) -> None:
    bodies = {peer.ask(Case(MODEL, form, 8, 150.0, tmp_path), ROW).body for form in peer.encodings}
    assert len(bodies) == len(peer.encodings)


def test_peers_are_chosen_by_environment() -> None:
    assert [peer.name for peer in chosen("mosec,sloop", PEERS)] == ["sloop", "mosec", "mosec, msgspec"]
    assert chosen("", PEERS) == list(PEERS)
    with pytest.raises(SystemExit, match="no peer torchserve; known: sloop, mosec"):
        chosen("torchserve", PEERS)
