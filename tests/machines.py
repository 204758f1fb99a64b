"""Machines of any size for tests: what the system says of CPUs and control groups, in files."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from sloop import machine
from sloop.serve.cpu_quota import remove_tree

GROUPS: Final = "/sys/fs/cgroup"


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


class RealMachine:
    """Control groups of the kernel for a process and what it starts; needs root. OSError where none can be made."""

    def __init__(self, name: str) -> None:
        self.version, roots = (1, ["cpu", "memory"]) if Path(GROUPS, "cpu").is_dir() else (2, [""])
        self.folders = [Path(GROUPS, root, name) for root in roots]
        for folder in self.folders:
            folder.mkdir()
        self.limit(cores=1)

    def limit(self, *, cores: float | None = None, memory_bytes: int | None = None) -> None:
        """Write limits, also while processes run in the group."""
        cpu, memory = self.folders[0], self.folders[-1]
        if cores is not None and self.version == 1:
            (cpu / "cpu.cfs_period_us").write_text("100000")
            (cpu / "cpu.cfs_quota_us").write_text(str(round(cores * 100_000)))
        elif cores is not None:
            (cpu / "cpu.max").write_text(f"{round(cores * 100_000)} 100000")
        if memory_bytes is not None:
            name = "memory.limit_in_bytes" if self.version == 1 else "memory.max"
            (memory / name).write_text(str(memory_bytes))

    @contextmanager
    def inside(self) -> Iterator[None]:
        """What this process starts now is in the group."""
        for folder in self.folders:
            (folder / "cgroup.procs").write_text(str(os.getpid()))
        try:
            yield
        finally:
            for folder in self.folders:
                (folder.parent / "cgroup.procs").write_text(str(os.getpid()))

    def remove(self) -> None:
        """Remove the groups, once their processes have ended."""
        until_s = time.monotonic() + 20
        while any(folder.exists() for folder in self.folders) and time.monotonic() < until_s:
            for folder in self.folders:
                remove_tree(folder)
            time.sleep(0.05)
