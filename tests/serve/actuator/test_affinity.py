import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sloop.serve.actuator.affinity import Affinity
from sloop.serve.actuator.grant import Grant

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
