"""How large this machine is: CPUs, and what control groups leave of them."""

import os
from math import ceil
from pathlib import Path

import pytest

from sloop.app.hardware import foreign_profiles, local, read_cluster
from sloop.app.load import load_application
from sloop.errors import InputError
from sloop.machine import capacity, hardware_name, processor, quota
from sloop.options import as_value
from sloop.profile.measure import checked_cores, default_cores
from sloop.systems.setup import set_up
from sloop.units import GIB
from tests.machines import FakeMachine

VERSIONS = pytest.mark.parametrize("version", [1, 2])


def test_this_machine_has_no_more_cores_than_cpus() -> None:
    here = capacity()
    assert 0 < here.cores <= len(os.sched_getaffinity(0))
    assert here.memory_bytes is not None
    assert here.memory_bytes > 0


@VERSIONS
def test_without_limits_the_machine_is_its_cpus_and_memory(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = FakeMachine(tmp_path, monkeypatch, version=version)
    made.limit("/", memory_bytes=9_223_372_036_854_771_712)  # no limit in version 1
    here = capacity()
    assert (here.cores, here.limits) == (8, "")
    assert here.memory_bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_max_is_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = FakeMachine(tmp_path, monkeypatch)
    (made.mount / "cpu.max").write_text("max 100000\n")
    (made.mount / "memory.max").write_text("max\n")
    assert capacity().limits == ""


@VERSIONS
def test_the_smallest_limit_on_the_way_to_the_root_counts(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also above a group that has none, and each resource by itself."""
    made = FakeMachine(tmp_path, monkeypatch, version=version)
    made.move("/pod/container/leaf")
    made.limit("/pod", cores=1.5, memory_bytes=2 * GIB)
    made.limit("/pod/container", cores=4, memory_bytes=GIB)
    here = capacity()
    assert (here.cores, here.memory_bytes) == (1.5, GIB)
    assert "/pod/cpu." in here.cores_file
    assert "/pod/container/memory." in here.memory_file
    assert here.limits == f"1.5 cores by {here.cores_file} and 1 GiB of memory by {here.memory_file}"


def test_a_group_outside_of_what_is_mounted_is_the_mounted_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container with a name space of its own, in which a process was placed from outside."""
    made = FakeMachine(tmp_path, monkeypatch)
    (made.proc / "self" / "cgroup").write_text("0::/../elsewhere\n")
    made.limit("/", cores=2)
    assert capacity().cores == 2


@pytest.mark.parametrize(("quota_us", "cores"), [(33_333, 0.333), (66_667, 0.666), (50, 0.001), (0, 0.001)])
def test_cores_are_thousandths_rounded_down(
    quota_us: int, cores: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 1 refuses a group more than the one above it has."""
    made = FakeMachine(tmp_path, monkeypatch)
    (made.mount / "cpu.max").write_text(f"{quota_us} 100000\n")
    assert capacity().cores == cores
    time_us, period_us = quota(cores)
    assert time_us / period_us <= max(cores, quota_us / 100_000)


@VERSIONS
@pytest.mark.parametrize(
    ("cores", "measured"), [(0.5, (0.5,)), (1.0, (1.0,)), (1.5, (1.0, 1.5)), (4.0, (1.0, 2.0, 4.0))]
)
def test_all_ask_the_same_machine(
    cores: float, measured: tuple[float, ...], version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`local` nodes, names of hardware, profiles and servers."""
    made = FakeMachine(tmp_path, monkeypatch, version=version)
    made.move("/pod")
    made.limit("/pod", cores=cores, memory_bytes=3 * GIB)
    [node] = read_cluster(as_value({"nodes": [{"hardware": "local"}]}))
    assert (node.cores, node.memory_bytes) == (cores, 3 * GIB)
    assert "limited to" in local().source
    assert hardware_name() == f"{processor()}, {cores:g} cores"
    assert default_cores() == measured
    assert checked_cores(measured) == measured
    with pytest.raises(InputError, match=r"this process may use .* by .*/pod/cpu"):
        checked_cores([ceil(cores) + 1])


def test_what_no_machine_of_this_size_could_hold_names_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = FakeMachine(tmp_path, monkeypatch)
    made.limit("/", cores=1.5, memory_bytes=GIB // 4)
    profile = {
        "latency_ms": {"form": "quadratic", "alpha": 0, "beta": 1, "gamma": 1},
        **{"max_batch": 1, "max_cores": 4, "memory_bytes": GIB},
    }
    stages = [{"name": "a", "profile": profile}]
    with pytest.raises(InputError, match="which no node could hold") as caught:
        set_up(
            load_application({"name": "x", "slo_ms": 99, "stages": stages, "system": {"name": "static", "cores": 1}})
        )
    assert f"to 1.5 cores by {made.mount}/cpu.max and 0.25 GiB of memory by {made.mount}/memory.max" in str(
        caught.value.help
    )


@pytest.mark.parametrize(("cores", "warned"), [(1.0, True), (1.5, True), (2.0, False), (8.0, False)])
def test_a_profile_from_a_machine_with_cores_to_spare_is_warned_of_on_a_small_one(
    cores: float, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the server's own processes take part of what the model had alone."""
    FakeMachine(tmp_path, monkeypatch).limit("/", cores=cores)
    profile = {"latency_ms": {"form": "quadratic", "alpha": 0, "beta": 1, "gamma": 1}, "max_batch": 1, "max_cores": 4}

    def warnings(hardware: str) -> tuple[str, ...]:
        stages = [{"name": "a", "profile": profile | {"hardware": hardware}}]
        return foreign_profiles(load_application({"name": "x", "slo_ms": 99, "stages": stages}))

    found = warnings(f"{processor()}, 4 cores")
    assert bool(found) is warned
    assert not warned or f"measured on 4 cores, this machine has {cores:g}, which the server" in found[0]
    assert warnings(f"{processor()}, {cores:g} cores") == warnings(f"kind: {processor()}") == warnings("") == ()
