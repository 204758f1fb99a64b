"""A running server seen from outside: its own clock, and how many of its replicas are ready."""

import time
from typing import Final
from urllib.request import urlopen

import msgspec
from msgspec import Struct

from sloop.vocabulary import Life

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


def wait_ready(url: str, count: int) -> None:
    """Until so many replicas are ready. TimeoutError after `READY_S_MAX`."""
    until_s = time.monotonic() + READY_S_MAX
    while sum(replica.life is Life.READY for stage in state_of(url).stages for replica in stage.replicas) < count:
        if time.monotonic() > until_s:
            raise TimeoutError(f"{count} replicas were not ready within {READY_S_MAX:g} s")
        time.sleep(0.05)
