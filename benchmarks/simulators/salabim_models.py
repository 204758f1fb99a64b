"""The two queues in salabim, in its faster mode with generators, and with trace and monitors off.

`resource` is as in its manual: a component per request asks a Resource for a turn. `by-hand`: a component per server
takes requests from a plain deque, and is passive when there is none.
"""

from collections import deque
from collections.abc import Iterator
from math import log
from random import Random
from typing import Any

import salabim  # type: ignore[import-not-found]  # in an environment of its own

from benchmarks.simulators.setting import BATCH_MAX, BATCHING, MANY_SERVERS, SERVICE_S, Case, Waits, batch_s, main

Process = Iterator[Any]
salabim.yieldless(False)


def resource(case: Case) -> Waits:
    draw, gap_s, waits = Random(case.seed).random, 1 / case.rate_rps, list[float]()
    env = salabim.Environment(trace=False)
    servers = salabim.Resource("servers", case.servers, monitor=False)

    class Request(salabim.Component):  # type: ignore[misc]
        def process(self) -> Process:
            came_s = env.now()
            yield self.request(servers)
            if case.waits:
                waits.append(env.now() - came_s)
            yield self.hold(-SERVICE_S * log(1.0 - draw()))
            self.release()

    class Source(salabim.Component):  # type: ignore[misc]
        def process(self) -> Process:
            for _ in range(case.requests):
                yield self.hold(-gap_s * log(1.0 - draw()))
                Request("")

    Source("")
    env.run()
    return {"all": waits}


def by_hand(case: Case) -> Waits:
    draw, gap_s, waits = Random(case.seed).random, 1 / case.rate_rps, list[float]()
    env = salabim.Environment(trace=False)
    queue: deque[float] = deque()
    idle: deque[Any] = deque()

    class Server(salabim.Component):  # type: ignore[misc]
        def process(self) -> Process:
            while True:
                if not queue:
                    idle.append(self)
                    yield self.passivate()
                    continue
                came_s = queue.popleft()
                if case.waits:
                    waits.append(env.now() - came_s)
                yield self.hold(-SERVICE_S * log(1.0 - draw()))

    class Source(salabim.Component):  # type: ignore[misc]
        def process(self) -> Process:
            for _ in range(case.requests):
                yield self.hold(-gap_s * log(1.0 - draw()))
                queue.append(env.now())
                if idle:
                    idle.popleft().activate()

    Source("")
    for _ in range(case.servers):
        Server("")
    env.run()
    return {"all": waits}


def batching(case: Case) -> Waits:
    draw, gap_s = Random(case.seed).random, 1 / case.rate_rps
    mean_s = [batch_s(size) for size in range(BATCH_MAX + 1)]
    env = salabim.Environment(trace=False)
    queues: tuple[deque[float], deque[float]] = deque(), deque()
    urgent, patient = queues
    waits: tuple[list[float], list[float]] = [], []
    idle: deque[Any] = deque()

    class Server(salabim.Component):  # type: ignore[misc]
        def process(self) -> Process:
            while True:
                size = min(BATCH_MAX, len(urgent) + len(patient))
                if not size:
                    idle.append(self)
                    yield self.passivate()
                    continue
                first = min(size, len(urgent))
                came = [urgent.popleft() for _ in range(first)], [patient.popleft() for _ in range(size - first)]
                if case.waits:
                    for kind in (0, 1):
                        waits[kind].extend(env.now() - came_s for came_s in came[kind])
                yield self.hold(-mean_s[size] * log(1.0 - draw()))

    class Source(salabim.Component):  # type: ignore[misc]
        def process(self) -> Process:
            for _ in range(case.requests):
                yield self.hold(-gap_s * log(1.0 - draw()))
                queues[draw() < 0.5].append(env.now())
                if idle:
                    idle.popleft().activate()

    Source("")
    for _ in range(case.servers):
        Server("")
    env.run()
    return {"urgent": waits[0], "patient": waits[1]}


if __name__ == "__main__":
    main(
        {
            (MANY_SERVERS, "resource"): resource,
            (MANY_SERVERS, "by-hand"): by_hand,
            (BATCHING, "by-hand"): batching,
        }
    )
