"""Hardware: sound figures with a source, declared clusters, and the machine we are on."""

from typing import Any

import pytest

from sloop.app import hardware
from sloop.app.hardware import (
    CUSTOM,
    GIB,
    KINDS,
    LOCAL,
    acquire_s,
    foreign_profiles,
    known_kinds,
    local,
    read_cluster,
    shared_profiles,
)
from sloop.app.load import load_application
from sloop.errors import InputError
from sloop.options import as_value
from sloop.vocabulary import Device, Node


def test_every_kind_has_a_price_with_a_source() -> None:
    for name, kind in KINDS.items():
        assert kind.name == name
        assert kind.cores >= 2
        assert kind.memory_bytes >= GIB
        assert 0.1 < kind.usd_per_h < 5
        assert "EC2" in kind.source


def test_a_node_of_a_kind() -> None:
    device = Device("T4", "T4", 16 * GIB)
    assert KINDS["g4dn.xlarge"].node("n") == Node("n", "g4dn.xlarge", 4, 16 * GIB, (device,), 0.526)
    assert KINDS["p2.xlarge"].devices == (Device("K80", "K80", 12 * GIB, clients_max=16),)
    assert acquire_s("c5.2xlarge") == acquire_s("rack") == 60


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


def cluster(*groups: dict[str, Any]) -> tuple[Node, ...]:
    return read_cluster(as_value({"nodes": list(groups)}))


def test_nodes_beyond_count_are_on_demand() -> None:
    nodes = cluster({"hardware": "c5.2xlarge", "count": 1, "most": 3}, {"hardware": "m5.xlarge", "count": 0, "most": 1})
    assert [(node.name, node.on_demand) for node in nodes] == [
        ("c5.2xlarge-0", False),
        ("c5.2xlarge-1", True),
        ("c5.2xlarge-2", True),
        ("m5.xlarge-3", True),
    ]


def test_fewer_nodes_at_most_than_there_always_are() -> None:
    with pytest.raises(InputError, match="`most` is 1, less than `count`, 2"):
        cluster({"hardware": "c5.2xlarge", "count": 2, "most": 1})


def test_devices_are_known_kinds_or_declared() -> None:
    declared = [{"kind": "A10", "memory_gib": 24, "clients": 3}, "T4", {"kind": "T4", "memory_gib": 8, "name": "half"}]
    (node,) = cluster({"hardware": "custom", "cores": 4, "devices": declared})
    assert node.devices == (
        Device("A10", "A10", 24 * GIB, 3),
        Device("T4", "T4", 16 * GIB),
        Device("half", "T4", 8 * GIB),
    )
    (bare,) = cluster({"hardware": "g4dn.xlarge", "devices": []})
    assert bare.devices == ()


def test_one_profile_for_several_kinds_is_an_assumption() -> None:
    stages = [{"name": "a", "profile": "ResNet-T", "profiles": {"m5.xlarge": "ResNet18-human"}}]
    kinds = [{"hardware": kind} for kind in ("c5.2xlarge", "m5.xlarge", "r5.large")]
    declared = {"name": "x", "slo_ms": 9, "stages": stages, "cluster": {"nodes": kinds}}
    (line,) = shared_profiles(load_application(declared))
    assert line.startswith("a/a: one profile is taken as its speed on c5.2xlarge and r5.large")
    assert shared_profiles(load_application(declared | {"cluster": {"nodes": kinds[:2]}})) == ()
