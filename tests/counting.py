"""What code costs, counted instead of timed: the same on every machine, so that a bound can be narrow.

Calls of Python functions are counted by name, bytecode instructions in all. CPython 3.11 counts a comprehension as a
call of its own, later ones do not; instructions differ between versions by some per cent.
"""

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


def calls_of(act: Callable[[], object]) -> Counter[str]:
    """How often each Python function is entered while `act` runs, by qualified name; generators at each resumption."""
    found: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            found[frame.f_code.co_qualname] += 1

    before = sys.getprofile()
    with _no_collections():
        sys.setprofile(count)
        try:
            act()
        finally:
            sys.setprofile(before)
    return found


def instructions_of(act: Callable[[], object]) -> int:
    """How many bytecode instructions `act` runs."""
    found = 0

    def count(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal found
        if event == "call":
            frame.f_trace_lines, frame.f_trace_opcodes = False, True
        elif event == "opcode":
            found += 1
        return count

    before = sys.gettrace()
    with _no_collections():
        sys.settrace(count)
        try:
            act()
        finally:
            sys.settrace(before)
    return found


@contextmanager
def _no_collections() -> Iterator[None]:
    """The collector calls functions of others (`gc.callbacks`), such as Hypothesis' once it was used."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
