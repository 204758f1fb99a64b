"""A server seen from outside: its own clock, how many of its replicas are ready, how long they took to be."""

import time
from pathlib import Path
from statistics import median
from typing import Final
from urllib.request import urlopen

import msgspec
from msgspec import Struct

from sloop.actions import StartReplica
from sloop.events import ReplicaReady
from sloop.runlog import read_log
from sloop.units import to_s
from sloop.vocabulary import Life, ReplicaId, Request

READY_S_MAX: Final = 60.0
"""Until all replicas are ready, before the load and, for the last replacement, after it."""


class _Replica(Struct, frozen=True):
    life: Life


class _Stage(Struct, frozen=True):
    replicas: list[_Replica]


class _State(Struct, frozen=True):
    """What is used here of `/v2/sloop/state`."""

    now_s: float
    stages: list[_Stage]


def state_of(url: str) -> _State:
    with urlopen(f"{url}/v2/sloop/state", timeout=5) as answer:
        return msgspec.json.decode(answer.read(), type=_State)


def start_s_of(log: Path, *, loaded: bool = False) -> float:
    """How long replicas took from the order to being ready, the median; `loaded`: of those ready once there was load,
    where there are such."""
    ordered_ns: dict[ReplicaId, int] = {}
    took_s: dict[bool, list[float]] = {False: [], True: []}
    has_load = False
    for now_ns, record in read_log(log):
        has_load = has_load or isinstance(record, Request)
        if isinstance(record, StartReplica):
            ordered_ns[record.replica] = now_ns
        elif isinstance(record, ReplicaReady):
            took_s[has_load].append(to_s(now_ns - ordered_ns[record.replica]))
    return median(took_s[True] if loaded and took_s[True] else took_s[False] + took_s[True])


def wait_ready(url: str, count: int) -> None:
    """Until so many replicas are ready. TimeoutError after `READY_S_MAX`."""
    until_s = time.monotonic() + READY_S_MAX
    while sum(replica.life is Life.READY for stage in state_of(url).stages for replica in stage.replicas) < count:
        if time.monotonic() > until_s:
            raise TimeoutError(f"{count} replicas were not ready within {READY_S_MAX:g} s")
        time.sleep(0.05)
