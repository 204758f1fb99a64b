"""Machines of any size for tests: what the system says of CPUs and control groups, in files."""

import os
from pathlib import Path

import pytest

from sloop import machine


class FakeMachine:
    """A machine with so many CPUs, whose control groups, of one version, are folders of the test."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, cpus: int = 8, version: int = 2) -> None:
        self.version, self.proc, self.mount = version, folder / "proc", folder / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        controllers = {1: ("cpu", "memory"), 2: ("",)}[version]
        lines = [
            f"2 1 0:2 / {self.mount / name} rw - {f'cgroup cgroup rw,{name}' if name else 'cgroup2 cgroup2 rw'}"
            for name in controllers
        ]
        (self.proc / "self" / "mountinfo").write_text("\n".join(["1 0 0:1 / / rw - overlay overlay rw", *lines, ""]))
        self.move("/")
        monkeypatch.setattr(machine, "PROC", self.proc)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpus)))

    def move(self, group: str) -> None:
        """The group that this process is in."""
        controllers = {1: ("3:memory", "2:cpu"), 2: ("0:",)}[self.version]
        (self.proc / "self" / "cgroup").write_text("".join(f"{each}:{group}\n" for each in controllers))
        for controller in ("cpu", "memory"):
            self._folder(group, controller).mkdir(parents=True, exist_ok=True)

    def _folder(self, group: str, controller: str) -> Path:
        return self.mount / (controller if self.version == 1 else "") / group.strip("/")

    def limit(self, group: str, *, cores: float | None = None, memory_bytes: int | None = None) -> None:
        """Write the limits of a group, with the kernel's usual period of 100 ms."""
        if cores is not None:
            folder, time_us = self._folder(group, "cpu"), round(cores * 100_000)
            if self.version == 2:
                (folder / "cpu.max").write_text(f"{time_us} 100000\n")
            else:
                (folder / "cpu.cfs_period_us").write_text("100000\n")
                (folder / "cpu.cfs_quota_us").write_text(f"{time_us}\n")
        if memory_bytes is not None:
            name = "memory.max" if self.version == 2 else "memory.limit_in_bytes"
            (self._folder(group, "memory") / name).write_text(f"{memory_bytes}\n")
