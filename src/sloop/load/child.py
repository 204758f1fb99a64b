"""The sending process: reads its orders from a folder, sends, writes records, says how far it is.

Promises a process that does nothing else: its own interpreter, no garbage collection while it sends, the CPUs it was
given. Its standard output belongs to the protocol of `orders`.
"""

import asyncio
import gc
import os
import resource
import sys
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from sloop.load.connections import Server
from sloop.load.orders import RECORDS, Orders, Told, open_schedule, read_orders
from sloop.load.record import RecordWriter
from sloop.load.sender import Progress, Target, Tell, send_closed, send_open
from sloop.load.wire import RequestHead
from sloop.units import to_s

DESCRIPTORS_SPARE = 64
"""Beside the connections: files, the loop's own, the standard streams."""

NICENESS = -10
"""Takes the right to raise one's priority, such as root's; without it the sender runs as any other process."""


def main(folder: Path) -> None:
    """Make this process a sender, then carry out the orders in `folder`."""
    orders, _ = read_orders(folder)
    if orders.cpus and hasattr(os, "sched_setaffinity"):
        try:
            os.sched_setaffinity(0, orders.cpus)
        except OSError as error:
            tell(Told(finished=True, error=f"cannot run on the CPUs {list(orders.cpus)}: {error.strerror}"))
            return
    # Ahead of other processes where the system lets us: a measuring device should be the last to be kept waiting.
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    gc.freeze()
    gc.disable()
    carry_out(folder)


def carry_out(folder: Path) -> None:
    """Send what is ordered, record it, and say how far it is."""
    orders, bodies = read_orders(folder)
    target = _target(orders, bodies, connections_max=allowed_connections(orders.connections_max))
    with (folder / RECORDS).open("wb", buffering=0) as file:
        records = RecordWriter(file)
        progress = Progress()

        def note(latest: Progress) -> None:
            nonlocal progress
            progress = latest
            tell(_told(latest, finished=False))

        run_until_done(_sending(orders, target, folder, records, note))
        records.flush()
    tell(_told(progress, finished=True))


def _sending(
    orders: Orders, target: Target, folder: Path, records: RecordWriter, note: Tell
) -> Coroutine[Any, Any, None]:
    closed = orders.closed
    if closed is None:
        return send_open(target, open_schedule(folder), records, note)
    return send_closed(
        target,
        records,
        note,
        connections=closed.connections,
        warmup_ns=closed.warmup_ns,
        end_ns=closed.end_ns,
    )


def run_until_done(sending: Coroutine[Any, Any, None]) -> None:
    """On uvloop where there is one: half the cost of a request."""
    try:
        import uvloop  # noqa: PLC0415  # only where installed
    except ImportError:
        asyncio.run(sending)
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(sending)


def _target(orders: Orders, bodies: list[bytes], *, connections_max: int) -> Target:
    heads = [
        RequestHead(
            path=orders.path,
            host=orders.authority,
            slo_ms=orders.slo_ms,
            content_bytes=len(body),
            json_bytes=json_bytes,
        )
        for body, json_bytes in zip(bodies, orders.json_bytes, strict=True)
    ]
    return Target(
        server=Server(orders.host, orders.port, orders.tls),
        heads=heads,
        bodies=bodies,
        connections_max=connections_max,
        warm_connections=min(orders.warm_connections, connections_max),
        timeout_ns=orders.timeout_ns,
    )


def allowed_connections(connections_max: int) -> int:
    """As many connections as the system lets this process have, its soft limit raised as far as it goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections_max + DESCRIPTORS_SPARE
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return max(1, min(connections_max, soft - DESCRIPTORS_SPARE))
    return connections_max


def _told(progress: Progress, *, finished: bool) -> Told:
    return Told(to_s(progress.at_ns), progress.sent, progress.ended, progress.connections, finished)


def tell(told: Told) -> None:
    """One line to the process that gave the orders."""
    sys.stdout.buffer.write(msgspec.json.encode(told) + b"\n")
    sys.stdout.buffer.flush()
