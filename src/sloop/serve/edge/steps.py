"""Work on large requests and answers in steps, so that none of them holds the event loop for long.

Such work is a generator that yields after every fraction of a millisecond, wherever it may be interrupted. What is
small is done at once: a generator would cost it a microsecond and a turn.
"""

import time
from collections.abc import Callable, Generator
from http import HTTPStatus
from typing import Final, TypeVar

from sloop.serve.edge.refusal import Refusal
from sloop.units import NS_PER_MS

T = TypeVar("T")

Steps = Generator[None, None, T]
"""Work in steps, which then returns its result."""
Later = Callable[[Callable[[], None]], None]
"""Calls a function in a later turn of the event loop, when it is its turn: `Intake.go_on_later`."""

LARGE_BYTES: Final = 32 * 1024
"""Larger bodies are read in steps; this one takes less than a millisecond in nearly any form."""
STEP_NS: Final = 3 * NS_PER_MS // 10
"""How long work goes on before others get their turn; no single step takes longer than that."""


def do_in_steps(
    steps: Steps[None], later: Later, is_wanted: Callable[[], bool], fail: Callable[[Exception, int], None]
) -> None:
    """Do work for `STEP_NS` now, and then in each of its turns, as long as it is wanted. `fail` gets the exception that
    ends it, and the time in ns that it has taken."""
    _Work(steps, later, is_wanted, fail).go_on()


class _Work:
    """Work under way. No function that knows itself: what it holds would be freed by the garbage collector only."""

    __slots__ = ("_fail", "_is_wanted", "_later", "_spent_ns", "_steps")

    def __init__(
        self,
        steps: Steps[None],
        later: Later,
        is_wanted: Callable[[], bool],
        fail: Callable[[Exception, int], None],
    ) -> None:
        self._steps, self._later, self._is_wanted, self._fail = steps, later, is_wanted, fail
        self._spent_ns = 0

    def go_on(self) -> None:
        if not self._is_wanted():
            self._steps.close()
            return
        begun_ns = time.monotonic_ns()
        try:
            for _ in self._steps:
                now_ns = time.monotonic_ns()
                if now_ns - begun_ns >= STEP_NS:
                    self._spent_ns += now_ns - begun_ns
                    self._later(self.go_on)
                    return
        except Exception as error:
            self._fail(error, self._spent_ns + time.monotonic_ns() - begun_ns)


def within(until_ns: int, steps: Steps[T]) -> Steps[T]:
    """The same work. Raises a 504 if it is not done at `until_ns`, in `time.monotonic_ns`: nobody would wait for the
    answer any more."""
    try:
        while True:
            try:
                next(steps)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]  # what the steps return
            if time.monotonic_ns() > until_ns:
                what = "dropped: its deadline had passed before it was read"
                raise Refusal(HTTPStatus.GATEWAY_TIMEOUT, what, "allow more time with x-slo-ms, or send less")
            yield
    finally:
        steps.close()


def at_once(steps: Steps[T]) -> T:
    """The result of work that is done now."""
    try:
        while True:
            next(steps)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]  # likewise
