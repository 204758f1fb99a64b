"""Control groups against a tree of plain files, and against the machine's own where it lets us."""

import os
import subprocess
import sys
from collections.abc import Iterator
from math import inf
from pathlib import Path

import pytest

from sloop.errors import MachineError
from sloop.serve.actuator.cgroup import Cgroups, open_v1, open_v2, own_group, quota, quota_above, remove_stale
from sloop.serve.actuator.grant import Grant

CPUS = float(len(os.sched_getaffinity(0)))


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc that tells of a container with both versions mounted, its own group being the root of what it sees."""
    proc, v1, v2 = tmp_path / "proc", tmp_path / "cpu", tmp_path / "unified"
    for folder in (proc / "self", v1, v2 / "app"):
        folder.mkdir(parents=True)
    (proc / "self" / "mountinfo").write_text(
        f"1 0 0:1 / / rw - overlay overlay rw\n"
        f"2 1 0:2 /docker/abc {v1} rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
        f"3 1 0:3 / {v2} rw - cgroup2 cgroup2 rw\n"
    )
    (proc / "self" / "cgroup").write_text("4:memory:/m\n3:cpu,cpuacct:/docker/abc\n0::/app\n")
    (v2 / "app" / "cgroup.controllers").write_text("cpu memory\n")
    return proc


@pytest.mark.parametrize(
    ("cores", "expected"),
    [(2, (20_000, 10_000)), (0.5, (5_000, 10_000)), (0.1, (1_000, 10_000)), (0.05, (1_000, 20_000))],
)
def test_quotas_keep_the_period_short_and_above_the_kernels_least(cores: float, expected: tuple[int, int]) -> None:
    assert quota(cores) == expected


def test_the_own_group_is_found_below_what_is_mounted(proc: Path, tmp_path: Path) -> None:
    assert own_group(proc, 1) == tmp_path / "cpu"
    assert own_group(proc, 2) == tmp_path / "unified" / "app"


def test_version_2_delegates_the_controller_and_writes_cpu_max(proc: Path, tmp_path: Path) -> None:
    groups = open_v2(proc)
    folder = tmp_path / "unified" / "app" / f"sloop-{os.getpid()}"
    assert groups.folder == folder
    assert (folder.parent / "cgroup.subtree_control").read_text() == "+cpu"
    assert (folder / "cgroup.subtree_control").read_text() == "+cpu"
    assert groups.confine(7, 0.5) == Grant(0.5)
    assert (folder / "7" / "cpu.max").read_text() == "5000 10000"
    assert (folder / "7" / "cgroup.procs").read_text() == "7"
    assert groups.resize(7, 64) == Grant(CPUS)
    assert groups.read(7) == CPUS


def test_version_2_without_the_cpu_controller_is_refused(proc: Path, tmp_path: Path) -> None:
    (tmp_path / "unified" / "app" / "cgroup.controllers").write_text("memory\n")
    with pytest.raises(OSError, match="cpu controller is not available"):
        open_v2(proc)


def test_version_1_writes_period_and_quota(proc: Path, tmp_path: Path) -> None:
    groups = Cgroups(tmp_path, 1, 2.0)
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cpu.cfs_period_us").write_text("100000\n")
    assert groups.confine(7, 0.25) == Grant(0.25)
    assert (tmp_path / "7" / "cpu.cfs_period_us").read_text() == "10000"
    assert (tmp_path / "7" / "cpu.cfs_quota_us").read_text() == "2500"
    assert groups.read(7) == 0.25


def test_a_refusal_names_the_group_and_the_fix(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"(?s)control group .*/nowhere/7 cannot be set.*help: "):
        Cgroups(tmp_path / "nowhere", 1, 2.0).confine(7, 1)


def test_the_tightest_quota_above_counts(proc: Path, tmp_path: Path) -> None:
    assert quota_above(proc) == inf
    (tmp_path / "unified" / "app" / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "unified" / "cpu.max").write_text("max 100000\n")
    assert quota_above(proc) == 1.5


def test_trees_of_dead_servers_are_removed(tmp_path: Path) -> None:
    for name in ("sloop-1/10", "sloop-2/20", "sloop-other", "unrelated"):
        (tmp_path / "groups" / name).mkdir(parents=True)
    (tmp_path / "proc" / "2").mkdir(parents=True)
    remove_stale(tmp_path / "groups", tmp_path / "proc")
    assert sorted(path.name for path in (tmp_path / "groups").iterdir()) == ["sloop-2", "sloop-other", "unrelated"]


@pytest.fixture
def real() -> Iterator[Cgroups]:
    for open_groups in (open_v2, open_v1):
        try:
            groups = open_groups(Path("/proc"))
        except OSError:
            continue
        yield groups
        groups.close()
        assert not groups.folder.exists()
        return
    pytest.skip("this machine lets us make no control group with a CPU quota")


PACE = """
import time
while True:
    began, end = time.monotonic(), time.thread_time() + 0.02
    while time.thread_time() < end: pass
    print(time.monotonic() - began, flush=True)
"""


@pytest.mark.live
def test_half_the_cores_take_twice_the_time(real: Cgroups) -> None:
    """The exact ratio is for benchmarks/resize.py on a quiet machine; what else runs here can only add to the times."""
    with subprocess.Popen([sys.executable, "-c", PACE], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        real.confine(process.pid, 1)
        for cores in (0.5, 0.25):  # fractions small enough to be had even where others run
            assert real.resize(process.pid, cores) == Grant(cores)
            assert real.read(process.pid) == cores
            process.stdout.readline()  # may have begun under the quota before
            taken_s = sum(float(process.stdout.readline()) for _ in range(10))
            assert 0.9 < taken_s / (10 * 0.02 / cores) < 1.8
        process.kill()
    real.release(process.pid)
