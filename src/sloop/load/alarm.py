"""Wakes an event loop at an instant, to some tens of microseconds where the machine can.

Promises one call at or after the instant it was last set to. asyncio and libuv round their timers to milliseconds, a
thousand times the gap between requests at a high rate; Linux's timerfd does not. Elsewhere the loop's own timer serves.
"""

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Callable
from typing import Final, Protocol

from sloop.units import NS_PER_S

_CLOCK_MONOTONIC: Final = 1
_NONBLOCK_CLOEXEC: Final = os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)
_ABSOLUTE: Final = 1


class Alarm(Protocol):
    """A timer that can be set again and again."""

    def set(self, at_ns: int) -> None:
        """Call back at `at_ns` of `time.monotonic_ns`, once; an earlier setting is forgotten."""
        ...

    def close(self) -> None: ...


class _Spec(ctypes.Structure):
    """struct itimerspec: an interval (unused) and the first expiry."""

    _fields_ = [  # the form ctypes asks for
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    ]


class TimerFd:
    """Linux's timer as a file descriptor; `OSError` where there is none."""

    def __init__(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            self._settime = libc.timerfd_settime
            self._fd = int(libc.timerfd_create(_CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC))
        except (AttributeError, TypeError) as error:
            raise OSError(f"no timerfd here: {error}") from None
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._loop = loop
        self._call = call
        self._spec = _Spec()
        loop.add_reader(self._fd, self._ring)

    def set(self, at_ns: int) -> None:
        # An expiry of 0 would disarm the timer; instants in the past expire at once.
        self._spec.value_s, self._spec.value_ns = divmod(max(1, at_ns), NS_PER_S)
        if self._settime(self._fd, _ABSOLUTE, ctypes.byref(self._spec), None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def _ring(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return
        self._call()

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)


class LoopTimer:
    """The event loop's own timer."""

    def __init__(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        self._loop = loop
        self._call = call
        self._handle: asyncio.TimerHandle | None = None

    def set(self, at_ns: int) -> None:
        self.close()
        self._handle = self._loop.call_later(max(0, at_ns - time.monotonic_ns()) / NS_PER_S, self._call)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()


def alarm(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> Alarm:
    """The finest alarm this machine has."""
    if sys.platform == "linux":
        try:
            return TimerFd(loop, call)
        except OSError:
            pass
    return LoopTimer(loop, call)
