import pytest

from sloop.app import foreign
from sloop.app.foreign import foreign_profiles
from sloop.app.load import load_application

MEASURED = {"latency_ms": {"form": "quadratic", "alpha": 0, "beta": 1, "gamma": 1}, "max_batch": 4, "max_cores": 1}


def lines(hardware: str, node: str = "local") -> tuple[str, ...]:
    profile = MEASURED | ({"hardware": hardware} if hardware else {})
    stages = [{"name": "a", "profile": profile}]
    cluster = {"nodes": [{"hardware": node}]}
    return foreign_profiles(load_application({"name": "x", "slo_ms": 9, "stages": stages, "cluster": cluster}))


def test_another_processor_is_told_another_number_of_cores_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "processor", lambda: "Chip 1")
    [told] = lines("Chip 2, 8 cores")
    assert told.startswith("a/a: its profile is of Chip 2, this machine has Chip 1; measure it here")
    assert lines("Chip 1, 8 cores") == lines("Chip 1") == lines("") == ()
    assert lines("Chip 2, 8 cores", node="c5.4xlarge") == ()
