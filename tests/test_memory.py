"""What a process takes of the memory, and what the machine has left for it."""

from math import inf
from pathlib import Path

import pytest

from sloop.machine import Capacity
from sloop.memory import available_bytes, bounded

GIB = 2**30


@pytest.mark.parametrize(
    ("files", "cached"),
    [
        ({"memory.current": 3 * GIB}, "inactive_file"),
        ({"memory.usage_in_bytes": 3 * GIB}, "total_inactive_file"),
    ],
)
def test_what_a_control_group_has_left_has_the_pages_that_can_be_dropped(
    files: dict[str, int], cached: str, tmp_path: Path
) -> None:
    for name, size in files.items():
        (tmp_path / name).write_text(f"{size}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\n{cached} {GIB}\n")
    limit = Capacity(2.0, 4 * GIB, memory_file=str(tmp_path / "memory.max"))
    (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    assert available_bytes(limit, tmp_path / "meminfo") == 2 * GIB
    (tmp_path / "meminfo").write_text(f"MemAvailable: {GIB // 1024} kB\n")
    assert available_bytes(limit, tmp_path / "meminfo") == GIB


def test_what_the_system_does_not_say_is_no_bound(tmp_path: Path) -> None:
    assert available_bytes(Capacity(2.0, None), tmp_path / "none") == inf
    assert available_bytes(Capacity(2.0, GIB, memory_file=str(tmp_path / "memory.max")), tmp_path / "none") == GIB


def test_a_bound_is_at_most_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sloop.memory.available_bytes", lambda machine: 10.0 * GIB)
    with bounded(GIB) as small, bounded() as large:
        assert {small, large} <= {GIB, 9 * GIB, 0}
        assert (small == 0) == (large == 0)
