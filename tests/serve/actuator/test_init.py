import os
from pathlib import Path

import pytest

from sloop.serve.actuator import capacity_cores, detect
from sloop.serve.actuator.affinity import Affinity


def test_without_control_groups_affinity_is_taken_and_the_reasons_are_said(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "mountinfo").write_text("1 0 0:1 / / rw - overlay overlay rw\n")
    found = detect(tmp_path)
    assert isinstance(found.actuator, Affinity)
    assert found.why == (
        "affinity, fractions by resting between batches; "
        "cgroup v2: it is not mounted here; cgroup v1: it is not mounted here"
    )


@pytest.mark.live
def test_this_machine_has_an_actuator() -> None:
    found = detect()
    found.actuator.close()
    assert found.why


def test_capacity_is_no_more_than_the_cpus_we_may_run_on() -> None:
    assert 0 < capacity_cores() <= len(os.sched_getaffinity(0))
