"""Hardware: sound figures with a source, declared clusters, and the machine we are on."""

import json
from pathlib import Path
from typing import Any

import pytest

from sloop.app import hardware
from sloop.app.hardware import (
    ACCELERATORS,
    CUSTOM,
    KINDS,
    LOCAL,
    acquire_s,
    foreign_profiles,
    known_kinds,
    local,
    power_of,
    read_cluster,
    shared_profiles,
)
from sloop.app.load import load_application
from sloop.errors import InputError
from sloop.options import as_value
from sloop.profile.interference import BandwidthLaw
from sloop.profile.profile import DeviceSharing, Profile
from sloop.units import GIB
from sloop.vocabulary import Device, Node


def test_every_kind_has_a_price_with_a_source() -> None:
    for name, kind in KINDS.items():
        assert kind.name == name
        assert kind.cores >= 2
        assert kind.memory_bytes >= GIB
        assert 0.1 < kind.usd_per_h < 5 or "no price" in kind.source
        assert "EC2" in kind.source or "Flashpoint" in kind.source


def test_paldias_kinds_as_it_prints_them() -> None:
    """Table II; the memory of the GPU kinds is that of the GPU."""
    prices = {
        "p3.2xlarge": (3.06, 16),
        "p2.xlarge": (0.90, 12),
        "g3s.xlarge": (0.75, 8),
        "c6i.4xlarge": (0.68, 32),
        "c6i.2xlarge": (0.34, 16),
        "m4.xlarge": (0.20, None),  # 8 in the table, 16 at Amazon
    }
    for name, (usd_per_h, memory_gib) in prices.items():
        kind = KINDS[name]
        assert kind.usd_per_h == usd_per_h
        memory_bytes = kind.devices[0].memory_bytes if kind.devices else kind.memory_bytes
        assert memory_gib is None or memory_bytes == memory_gib * GIB


def test_what_is_known_of_accelerators() -> None:
    for device in ACCELERATORS.values():
        assert device.clients_max == (16 if device.kind in ("M60", "K80", "P40") else 48)
    (a10,) = KINDS["lambda.a10"].devices
    assert (KINDS["lambda.a10"].cores, a10.memory_bytes) == (30, 24 * GIB)


def test_power_is_in_proportion_to_the_busy_time() -> None:
    power = power_of(KINDS["p3.2xlarge"].node("n"))
    assert power is not None
    assert [power.watts(busy) for busy in (0, 0.5, 1, 2)] == [65, 195, 325, 325]
    assert power_of(KINDS["c5.2xlarge"].node("n")) is None
    assert power_of(Node("n", "rack", 4, 1)) is None


def test_a_node_of_a_kind() -> None:
    device = Device("T4", "T4", 16 * GIB)
    assert KINDS["g4dn.xlarge"].node("n") == Node("n", "g4dn.xlarge", 4, 16 * GIB, (device,), 0.526)
    assert KINDS["p2.xlarge"].devices == (Device("K80", "K80", 12 * GIB, clients_max=16),)
    assert acquire_s(KINDS["c5.2xlarge"].node("n")) == acquire_s(Node("n", "rack", 4, 1)) == 60


def test_this_machine() -> None:
    assert local().cores > 0
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


def test_racks_have_so_many_nodes_in_the_order_of_the_cluster() -> None:
    nodes = cluster({"hardware": "c5.2xlarge", "count": 3, "per_rack": 2}, {"hardware": "m5.xlarge", "count": 1})
    assert [node.rack for node in nodes] == ["rack-0", "rack-0", "rack-1", ""]


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


# Kinds of users

BOX = {"name": "box", "cores": 12, "memory_gib": 64, "devices": ["A10"], "usd_per_h": 1.1}


def with_kinds(kinds: object, *groups: dict[str, Any]) -> tuple[Node, ...]:
    return read_cluster(as_value({"kinds": kinds, "nodes": list(groups)}))


def test_own_kinds_are_used_like_known_ones() -> None:
    device = Device("A10", "A10", 24 * GIB)
    first, second = with_kinds([BOX], {"hardware": "box", "count": 2, "usd_per_h": 0.9})
    assert first == Node("box-0", "box", 12, 64 * GIB, (device,), 0.9)
    assert second.name == "box-1"


def test_own_kinds_say_how_long_they_take_and_what_they_draw() -> None:
    own = BOX | {"acquire_s": 7, "idle_w": 40, "max_w": 240}
    (node,) = with_kinds([own], {"hardware": "box", "count": 0, "most": 1})
    assert acquire_s(node) == 7
    power = power_of(node)
    assert power is not None
    assert (power.watts(0.5), power.origin) == (140, "declared")
    (silent,) = with_kinds([BOX], {"hardware": "box"})
    assert (acquire_s(silent), power_of(silent)) == (60, None)


def test_own_kinds_in_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    (folder / "kinds.yaml").write_text(
        "kinds:\n  - {name: box, cores: 12, usd_per_h: 1.1}\n  - {name: mini, cores: 2}\n"
    )
    profile = {"latency_ms": {"form": "quadratic", "alpha": 0, "beta": 1, "gamma": 1}, "max_batch": 4}
    app = tmp_path / "app.yaml"
    app.write_text(
        "name: x\nslo_ms: 9\n"
        f"stages: [{{name: a, profiles: {{box: {json.dumps(profile)}}}}}]\n"
        "cluster: {kinds: shared/kinds.yaml, nodes: [{hardware: box, count: 0, most: 2}]}\n"
    )
    nodes = load_application(app).cluster
    assert [(node.name, node.cores, node.usd_per_h, node.on_demand) for node in nodes] == [
        ("box-0", 12, 1.1, True),
        ("box-1", 12, 1.1, True),
    ]


@pytest.mark.parametrize(
    ("kinds", "wrong"),
    [
        ([BOX, BOX], "two hardware kinds are called 'box'"),
        ([BOX | {"name": "p3.2xlarge"}], "'p3.2xlarge' is the name of a known kind"),
        ([{"name": "box"}], "cores"),
        ([BOX | {"devices": ["A9"]}], "unknown accelerator 'A9'"),
        ([BOX | {"price": 1}], "unknown key 'price'"),
        ([BOX | {"idle_w": 5}], "idle_w: has no effect without `max_w`"),
        ([BOX | {"max_w": 5}], "max_w: has no effect without `idle_w`"),
        ([BOX | {"idle_w": 5, "max_w": 4}], "max_w: must be at least `idle_w`, 5, not 4"),
        ([BOX | {"acquire_s": -1}], "acquire_s: must be a number"),
        ("nowhere.yaml", "no file of hardware kinds 'nowhere.yaml'"),
    ],
)
def test_kinds_that_cannot_be(kinds: object, wrong: str) -> None:
    with pytest.raises(InputError, match=wrong):
        with_kinds(kinds, {"hardware": "box"})


def test_a_kind_that_nobody_has_declared() -> None:
    with pytest.raises(InputError, match="unknown hardware 'bix'") as error:
        with_kinds([BOX], {"hardware": "bix"})
    assert "box" in error.value.help


# How models share their device

SHARED = {"full_batch": 64, "bandwidth": 0.6, "law": {"form": "bandwidth", "alpha": 0.5}, "sm_use": {1: 0.1, 64: 0.9}}


def with_sharing(sharing: object, **more: object) -> Profile:
    profile = MEASURED | {"accelerator": "M60", "sharing": sharing} | more
    cluster = {"nodes": [{"hardware": "g3s.xlarge"}]}
    declared = {"name": "x", "slo_ms": 9, "stages": [{"name": "a", "profile": profile}], "cluster": cluster}
    found = load_application(declared).stages[0].variants[0].profile
    assert found is not None
    return found


def test_a_share_is_at_most_the_whole_device() -> None:
    with pytest.raises(InputError, match=r"device_share: must be a number above 0 and at most 1, not 1\.5"):
        with_sharing(SHARED, device_share=1.5)


def test_a_profile_says_how_a_model_shares_its_device() -> None:
    sharing = with_sharing(SHARED).sharing
    assert sharing == DeviceSharing(law=BandwidthLaw(0.5), full_batch=64, bandwidth=0.6, sm_use={1: 0.1, 64: 0.9})


@pytest.mark.parametrize(
    ("sharing", "wrong"),
    [
        ({"bandwidth": 0.5}, "full_batch"),
        (SHARED | {"bandwidth": 1.5}, "bandwidth is 1.5; it must be between 0 and 1"),
        (SHARED | {"law": {"form": "cosine"}}, "unknown law of interference 'cosine'"),
        (SHARED | {"bandwith": 0.5}, "did you mean 'bandwidth'"),
        (SHARED | {"sm_use": {4: 1.2}}, "sm_use at batch 4 is 1.2"),
    ],
)
def test_sharing_that_cannot_be(sharing: object, wrong: str) -> None:
    with pytest.raises(InputError, match=wrong):
        with_sharing(sharing)
