"""Watching a running server: its clock, how many replicas are ready, and how long their start took."""

import time
from pathlib import Path
from statistics import median
from typing import Final
from urllib.request import urlopen

import msgspec
from msgspec import Struct

from sloop.actions import StartWorker
from sloop.events import WorkerReady
from sloop.runlog import read_log
from sloop.units import to_s
from sloop.vocabulary import Life, ReplicaId, Request

READY_S_MAX: Final = 60.0
"""The longest wait for all replicas to be ready, before the load, and after it for the last replacement."""


class _Replica(Struct, frozen=True):
    life: Life


class _Stage(Struct, frozen=True):
    replicas: list[_Replica]


class _Application(Struct, frozen=True):
    stages: list[_Stage]


class _State(Struct, frozen=True):
    """The part of `/v2/sloop/state` that is used here."""

    now_s: float
    applications: list[_Application]

    @property
    def ready(self) -> int:
        """Ready replicas."""
        stages = [stage for application in self.applications for stage in application.stages]
        return sum(replica.life is Life.READY for stage in stages for replica in stage.replicas)


def state_of(url: str) -> _State:
    with urlopen(f"{url}/v2/sloop/state", timeout=5) as answer:
        return msgspec.json.decode(answer.read(), type=_State)


def start_s_of(log: Path, *, loaded: bool = False) -> float:
    """The median time of replicas from the order until they are ready; with `loaded`, of those that became ready under
    load, if there are any."""
    ordered_ns: dict[ReplicaId, int] = {}
    took_s: dict[bool, list[float]] = {False: [], True: []}
    has_load = False
    for now_ns, record in read_log(log):
        has_load = has_load or isinstance(record, Request)
        if isinstance(record, StartWorker):
            ordered_ns[record.worker] = now_ns
        elif isinstance(record, WorkerReady):
            took_s[has_load].append(to_s(now_ns - ordered_ns[record.worker]))
    return median(took_s[True] if loaded and took_s[True] else took_s[False] + took_s[True])


def wait_ready(url: str, count: int) -> None:
    """Wait until `count` replicas are ready. TimeoutError after `READY_S_MAX`."""
    until_s = time.monotonic() + READY_S_MAX
    while state_of(url).ready < count:
        if time.monotonic() > until_s:
            raise TimeoutError(f"{count} replicas were not ready within {READY_S_MAX:g} s")
        time.sleep(0.05)
