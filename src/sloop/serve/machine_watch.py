"""Notices while a server runs that its machine has got other limits, such as a pod that is resized in place.

Nobody tells a process that the limits of its control groups have changed, so the files are read once a second, in a
thread: less than a thousandth of a core.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from math import inf
from typing import Final

from msgspec import structs

from sloop.app.hardware import ANY_BYTES, LOCAL
from sloop.machine import Capacity, capacity
from sloop.text import counted
from sloop.units import GIB, WIDE_ROUNDING
from sloop.vocabulary import Node

LOOK_S: Final = 1.0

_log: Final = logging.getLogger("sloop.machine")


def refitted(nodes: Sequence[Node], begun: Capacity, now: Capacity) -> list[Node]:
    """The nodes that a cluster of this machine has now. `nodes` are those with which it began on the machine `begun`.

    A node that was the whole machine is the whole machine again. Other nodes have the cores that were declared or, if
    the machine has fewer than all nodes together, fewer in proportion; none has more memory than the machine.
    """
    wanted = [inf if node.hardware == LOCAL and node.cores == begun.cores else node.cores for node in nodes]
    share = min(1.0, now.cores / sum(wanted)) if inf not in wanted else 1.0
    found = []
    for node, cores in zip(nodes, wanted, strict=True):
        memory_bytes = node.memory_bytes
        if now.memory_bytes is not None and memory_bytes < ANY_BYTES:
            is_whole = node.hardware == LOCAL and memory_bytes == begun.memory_bytes
            memory_bytes = now.memory_bytes if is_whole else min(memory_bytes, now.memory_bytes)
        left = now.cores if cores == inf else int(cores * share * 1000 + WIDE_ROUNDING) / 1000
        found.append(structs.replace(node, cores=max(0.001, left), memory_bytes=memory_bytes))
    return found


async def watch(
    nodes: Sequence[Node],
    on_change: Callable[[Sequence[Node], float], None],
    begun: Capacity,
    look: Callable[[], Capacity] = capacity,
    every_s: float = LOOK_S,
) -> None:
    """Until cancelled: whenever the cores or the memory of the machine have changed, call `on_change` with the nodes
    and the cores of the machine. `begun` is the machine to which `nodes` belong."""
    before = begun
    while True:
        await asyncio.sleep(every_s)
        now = await asyncio.to_thread(look)
        if (now.cores, now.memory_bytes) != (before.cores, before.memory_bytes):
            before = now
            limits = f": limited to {now.limits}" if now.limits else ", without limits"
            memory = "" if now.memory_bytes is None else f" and {now.memory_bytes / GIB:.3g} GiB of memory"
            _log.warning("this machine has %s%s now%s", counted(now.cores, "core"), memory, limits)
            on_change(refitted(nodes, begun, now), now.cores)
