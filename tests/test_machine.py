import os

import pytest

from sloop.machine import hardware_name, processor, usable_cpus


def test_without_affinity_all_cpus_are_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert usable_cpus() == tuple(range(os.cpu_count() or 1))


def test_a_measurement_names_the_processor_and_its_cores() -> None:
    assert processor()
    assert hardware_name() == f"{processor()}, {len(usable_cpus())} cores"
