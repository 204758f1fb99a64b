"""HardwareKind kinds: sound figures with a source, and the machine we are on."""

import pytest

from sloop.app import hardware
from sloop.app.hardware import CUSTOM, GIB, KINDS, LOCAL, foreign_profiles, known_kinds, local
from sloop.app.load import load_application
from sloop.vocabulary import Node


def test_every_kind_has_a_price_with_a_source() -> None:
    for name, kind in KINDS.items():
        assert kind.name == name
        assert kind.cores >= 2
        assert kind.memory_bytes >= GIB
        assert 0.1 < kind.usd_per_h < 5
        assert "EC2" in kind.source


def test_a_node_of_a_kind() -> None:
    assert KINDS["g4dn.xlarge"].node("n") == Node("n", "g4dn.xlarge", 4, 16 * GIB, ("T4",), 0.526)


def test_this_machine() -> None:
    assert local() is local()
    assert local().cores >= 1
    assert local().usd_per_h == 0


def test_names() -> None:
    assert known_kinds()[:2] == (LOCAL, CUSTOM)
    assert "p3.2xlarge" in known_kinds()


MEASURED = {"latency_ms": {"form": "quadratic", "alpha": 0, "beta": 1, "gamma": 1}, "max_batch": 4, "max_cores": 1}


def foreign(processor: str, node: str = "local") -> tuple[str, ...]:
    profile = MEASURED | ({"hardware": processor} if processor else {})
    stages = [{"name": "a", "profile": profile}]
    cluster = {"nodes": [{"hardware": node}]}
    return foreign_profiles(load_application({"name": "x", "slo_ms": 9, "stages": stages, "cluster": cluster}))


def test_another_processor_is_told_another_number_of_cores_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "processor", lambda: "Chip 1")
    [warning] = foreign("Chip 2, 8 cores")
    assert warning.startswith("a/a: its profile is of Chip 2, this machine has Chip 1; measure it here")
    assert foreign("Chip 1, 8 cores") == foreign("Chip 1") == foreign("") == ()
    assert foreign("Chip 2, 8 cores", node="c5.4xlarge") == ()
