import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sloop.errors import InputError
from sloop.serve.actuator import Detected, detect
from sloop.serve.actuator import confined as module
from sloop.serve.actuator.affinity import Affinity
from sloop.serve.actuator.cgroup import Cgroups
from sloop.serve.actuator.confined import confined


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_without_control_groups_whole_cores_only(
    sleeper: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "detect", lambda: Detected(Affinity([0]), "no rights"))
    with confined(sleeper.pid, 1):
        assert os.sched_getaffinity(sleeper.pid) == {min(os.sched_getaffinity(0))}
    with pytest.raises(InputError, match="quota"), confined(sleeper.pid, 0.5):
        pass


def test_with_control_groups_a_quota_holds_and_nothing_is_left_behind(sleeper: "subprocess.Popen[bytes]") -> None:
    actuator = detect().actuator
    if not isinstance(actuator, Cgroups):
        pytest.skip("this machine gives us no control group")
    actuator.close()
    with confined(sleeper.pid, 0.5):
        group = Path(f"/proc/{sleeper.pid}/cgroup").read_text()
        assert f"sloop-{os.getpid()}/{sleeper.pid}" in group
        assert sleeper.stdin is not None
        sleeper.stdin.write(b"\n")
        sleeper.stdin.flush()
    assert not actuator.folder.exists()
