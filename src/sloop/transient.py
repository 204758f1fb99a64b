"""What a process keeps for itself: caches and callbacks. A snapshot of their owner leaves them out, by their type."""

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Transient:
    """What its owner can make anew, or another process does not need. Who reads a snapshot gets one that is as new:
    the class takes no arguments."""

    __slots__ = ()


class Cache(dict[K, V], Transient):
    """Values that are computed when they are first asked for."""

    __slots__ = ()
