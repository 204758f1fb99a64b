"""CPU quotas by control groups and by affinity."""

import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sloop.errors import InputError, MachineError
from sloop.machine import own_group, quota
from sloop.serve import cpu_quota as module
from sloop.serve.cpu_quota import (
    Affinity,
    Cgroups,
    Detected,
    Grant,
    confined,
    detect,
    open_v1,
    open_v2,
    prefix,
    remove_stale,
)
from tests.machines import FakeMachine


def test_without_control_groups_affinity_is_taken_and_the_reasons_are_said(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "mountinfo").write_text("1 0 0:1 / / rw - overlay overlay rw\n")
    found = detect(tmp_path)
    assert isinstance(found.actuator, Affinity)
    assert found.why == (
        "affinity, fractions by sleeping between batches; cgroup v2: not mounted; cgroup v1: not mounted"
    )


@pytest.mark.live
def test_this_machine_has_an_actuator() -> None:
    found = detect()
    found.actuator.close()
    assert found.why


@pytest.mark.parametrize(("cores", "threads"), [(0.1, 1), (1.0, 1), (1.0 + 1e-12, 1), (1.25, 2), (2.0, 2), (7.5, 8)])
def test_threads_are_cores_rounded_up(cores: float, threads: int) -> None:
    assert Grant(cores).threads == threads


CPUS = sorted(os.sched_getaffinity(0))
pytestmark = pytest.mark.live


@pytest.fixture
def sleeper() -> Iterator[int]:
    """A process with two threads that wait for nothing."""
    script = "import threading; threading.Thread(target=input).start(); print(flush=True); threading.Event().wait()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


def masks(pid: int) -> list[set[int]]:
    return [os.sched_getaffinity(int(thread)) for thread in os.listdir(f"/proc/{pid}/task")]


def test_a_fraction_is_a_whole_cpu_and_a_duty_cycle(sleeper: int) -> None:
    actuator = Affinity(CPUS)
    assert actuator.confine(sleeper, 0.25) == Grant(0.25, 0.25)
    assert masks(sleeper) == [{CPUS[0]}] * 2
    assert actuator.read(sleeper) == 0.25


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
def test_processes_are_spread_and_keep_what_they_have(sleeper: int) -> None:
    actuator = Affinity(CPUS[:2])
    actuator.confine(os.getpid(), 2)
    actuator.resize(os.getpid(), 1)
    actuator.confine(sleeper, 1)
    assert masks(sleeper) == [{CPUS[1]}] * 2
    assert actuator.resize(sleeper, 1.5) == Grant(1.5, 0.75)
    assert masks(sleeper) == [set(CPUS[:2])] * 2
    actuator.release(os.getpid())
    os.sched_setaffinity(0, CPUS)
    actuator.resize(sleeper, 1)
    assert masks(sleeper) == [{CPUS[0]}] * 2


def test_no_more_is_granted_than_there_is(sleeper: int) -> None:
    assert Affinity(CPUS[:1]).confine(sleeper, 4) == Grant(1, 1)


def test_without_affinity_all_cpus_count_and_resting_is_all_there_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    assert Affinity([0, 1], proc=tmp_path).confine(1, 1.5) == Grant(1.5, 0.75)


def test_a_process_that_has_exited_is_no_error() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    actuator = Affinity(CPUS)
    actuator.confine(process.pid, 1)
    actuator.release(process.pid)
    actuator.release(process.pid)
    actuator.close()


CPUS_cgroup = float(len(os.sched_getaffinity(0)))


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
    assert groups.resize(7, 64) == Grant(CPUS_cgroup)
    assert groups.read(7) == CPUS_cgroup


def test_version_2_moves_all_processes_of_its_group_into_a_leaf(
    proc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group with processes may not enable controllers for groups below it: cgroups(7), "no internal processes"."""
    own, ended = tmp_path / "unified" / "app", "13"
    inside = own / "cgroup.procs"
    inside.write_text(f"11\n12\n{ended}\n")
    write = Path.write_text
    moved: list[str] = []

    def kernel(path: Path, text: str) -> int:
        if path == own / "cgroup.subtree_control" and inside.read_text().split() != [ended]:
            raise OSError(errno.EBUSY, "busy")
        if path.name == "cgroup.procs":
            if text == ended:
                raise OSError(errno.ESRCH, "no such process")
            moved.append(text)
            write(inside, inside.read_text().replace(f"{text}\n", ""))
        return write(path, text)

    monkeypatch.setattr(Path, "write_text", kernel)
    open_v2(proc)
    assert moved == ["11", "12"]
    assert (own / "cgroup.subtree_control").read_text() == "+cpu"


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


def test_a_prepared_process_is_in_its_group_before_it_has_a_quota(tmp_path: Path) -> None:
    """And is not moved again; another process of the same number is."""
    groups = Cgroups(tmp_path, 2, 8.0)
    groups.prepare(7)
    assert [each.name for each in (tmp_path / "7").iterdir()] == ["cgroup.procs"]
    (tmp_path / "7" / "cgroup.procs").unlink()
    assert groups.confine(7, 1.5) == Grant(1.5)
    assert [each.name for each in (tmp_path / "7").iterdir()] == ["cpu.max"]
    groups.release(7)
    groups.confine(7, 1.5)
    assert (tmp_path / "7" / "cgroup.procs").read_text() == "7"


def test_a_refusal_names_the_group_and_the_fix(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"(?s)control group .*/nowhere/7 cannot be set.*help: "):
        Cgroups(tmp_path / "nowhere", 1, 2.0).confine(7, 1)


def test_trees_of_dead_servers_are_removed_but_not_those_of_other_containers(tmp_path: Path) -> None:
    (tmp_path / "proc" / "2").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "ns").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "ns" / "pid").touch()
    own = prefix(tmp_path / "proc")
    for name in (f"{own}1/10", f"{own}2/20", f"{own}other", "sloop-7-1/10", "unrelated"):
        (tmp_path / "groups" / name).mkdir(parents=True)
    remove_stale(tmp_path / "groups", tmp_path / "proc")
    left = {f"{own}2", f"{own}other", "sloop-7-1", "unrelated"}
    assert {path.name for path in (tmp_path / "groups").iterdir()} == left


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


@pytest.fixture
def sleeper_confined() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_without_control_groups_whole_cores_only(
    sleeper_confined: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "detect", lambda: Detected(Affinity([0]), "no rights"))
    with confined(sleeper_confined.pid, 1):
        assert os.sched_getaffinity(sleeper_confined.pid) == {min(os.sched_getaffinity(0))}
    with pytest.raises(InputError, match="quota"), confined(sleeper_confined.pid, 0.5):
        pass


def test_with_control_groups_a_quota_holds_and_nothing_is_left_behind(
    sleeper_confined: "subprocess.Popen[bytes]",
) -> None:
    actuator = detect().actuator
    if not isinstance(actuator, Cgroups):
        pytest.skip("this machine gives us no control group")
    actuator.close()
    with confined(sleeper_confined.pid, 0.5):
        group = Path(f"/proc/{sleeper_confined.pid}/cgroup").read_text()
        assert f"{prefix(Path('/proc'))}{os.getpid()}/{sleeper_confined.pid}" in group
        assert sleeper_confined.stdin is not None
        sleeper_confined.stdin.write(b"\n")
        sleeper_confined.stdin.flush()
    assert not actuator.folder.exists()


def test_processes_of_a_pool_share_one_quota(sleeper_confined: "subprocess.Popen[bytes]") -> None:
    actuator = detect().actuator
    if not isinstance(actuator, Cgroups):
        actuator.close()
        pytest.skip("this machine gives us no control group")
    pid = sleeper_confined.pid
    try:
        actuator.confine(pid, 0.25)
        assert actuator.join(pid, "node-0", 0.75) == Grant(0.75)
        assert actuator.read(pid) == 0.75
        assert not (actuator.folder / str(pid)).exists()
        assert (actuator.folder / "pool-node-0" / "cgroup.procs").read_text().split() == [str(pid)]
        actuator.release(pid)
    finally:
        sleeper_confined.kill()
        sleeper_confined.wait()
        until_s = time.monotonic() + 5
        while actuator.folder.exists() and time.monotonic() < until_s:
            time.sleep(0.01)
            actuator.close()
    assert not actuator.folder.exists()


def test_version_1_leaves_a_process_on_all_cores_to_the_groups_above(tmp_path: Path) -> None:
    """With a quota of its own, the kernel would refuse to give the groups above less."""
    groups = Cgroups(tmp_path, 1, 1.5)
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cpu.cfs_period_us").write_text("100000\n")
    assert groups.confine(7, 2) == Grant(1.5)
    assert (tmp_path / "7" / "cpu.cfs_quota_us").read_text() == "-1"
    assert groups.read(7) == 1.5
    assert groups.resize(7, 0.5) == Grant(0.5)
    assert (tmp_path / "7" / "cpu.cfs_quota_us").read_text() == "5000"


def test_a_quota_beyond_a_limit_that_has_just_shrunk_becomes_that_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeMachine(tmp_path / "machine", monkeypatch).limit("/", cores=1)
    groups, write = Cgroups(tmp_path, 2, 4.0), Path.write_text

    def kernel(path: Path, text: str) -> int:
        if path.name == "cpu.max" and text == "20000 10000":
            raise OSError(errno.EINVAL, "invalid argument")
        return write(path, text)

    monkeypatch.setattr(Path, "write_text", kernel)
    assert groups.confine(7, 2) == Grant(1)


@pytest.mark.parametrize(("capacity_cores", "granted"), [(0.5, Grant(0.5, 0.5)), (1.5, Grant(1.5, 0.75))])
def test_affinity_grants_no_more_than_the_machine_has(capacity_cores: float, granted: Grant, tmp_path: Path) -> None:
    actuator = Affinity([0, 1, 2], proc=tmp_path, capacity_cores=capacity_cores)
    assert actuator.confine(1, 2) == granted
    actuator.capacity_cores = 2
    assert actuator.resize(1, 4) == Grant(2)
