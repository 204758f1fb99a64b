"""The two queues in SimPy, each in the styles of an experienced user.

`resource` is as in SimPy's examples: a process per request asks a Resource for a turn and returns it at the end of a
`with`. `store`: a process per server takes requests from a Store. `by-hand`: a process per server uses a plain deque,
and SimPy's events only wake idle servers; this needs the fewest events, and none of SimPy's resources.
Random numbers are drawn inline in all simulators: `Random.expovariate` would cost each of them a call.
"""

from collections import deque
from collections.abc import Iterator
from math import log
from random import Random
from typing import Any

import simpy  # type: ignore[import-not-found]  # in an environment of its own

from benchmarks.simulators.setting import BATCH_MAX, BATCHING, MANY_SERVERS, SERVICE_S, Case, Waits, batch_s, main

Process = Iterator[Any]


def resource(case: Case) -> Waits:
    draw, gap_s, waits = Random(case.seed).random, 1 / case.rate_rps, list[float]()
    env = simpy.Environment()
    servers = simpy.Resource(env, case.servers)

    def request() -> Process:
        came_s = env.now
        with servers.request() as turn:
            yield turn
            if case.waits:
                waits.append(env.now - came_s)
            yield env.timeout(-SERVICE_S * log(1.0 - draw()))

    def source() -> Process:
        for _ in range(case.requests):
            yield env.timeout(-gap_s * log(1.0 - draw()))
            env.process(request())

    env.process(source())
    env.run()
    return {"all": waits}


def store(case: Case) -> Waits:
    draw, gap_s, waits = Random(case.seed).random, 1 / case.rate_rps, list[float]()
    env = simpy.Environment()
    queue = simpy.Store(env)

    def server() -> Process:
        while True:
            came_s = yield queue.get()
            if case.waits:
                waits.append(env.now - came_s)
            yield env.timeout(-SERVICE_S * log(1.0 - draw()))

    def source() -> Process:
        for _ in range(case.requests):
            yield env.timeout(-gap_s * log(1.0 - draw()))
            queue.put(env.now)

    env.process(source())
    for _ in range(case.servers):
        env.process(server())
    env.run()
    return {"all": waits}


def by_hand(case: Case) -> Waits:
    draw, gap_s, waits = Random(case.seed).random, 1 / case.rate_rps, list[float]()
    env = simpy.Environment()
    queue: deque[float] = deque()
    idle: deque[Any] = deque()

    def server() -> Process:
        while True:
            if not queue:
                idle.append(woken := env.event())
                yield woken
                continue
            came_s = queue.popleft()
            if case.waits:
                waits.append(env.now - came_s)
            yield env.timeout(-SERVICE_S * log(1.0 - draw()))

    def source() -> Process:
        for _ in range(case.requests):
            yield env.timeout(-gap_s * log(1.0 - draw()))
            queue.append(env.now)
            if idle:
                idle.popleft().succeed()

    env.process(source())
    for _ in range(case.servers):
        env.process(server())
    env.run()
    return {"all": waits}


def batching(case: Case) -> Waits:
    """The queues are deques in all styles, because SimPy cannot take several items from a store at once."""
    draw, gap_s = Random(case.seed).random, 1 / case.rate_rps
    mean_s = [batch_s(size) for size in range(BATCH_MAX + 1)]
    env = simpy.Environment()
    queues: tuple[deque[float], deque[float]] = deque(), deque()
    urgent, patient = queues
    waits: tuple[list[float], list[float]] = [], []
    idle: deque[Any] = deque()

    def server() -> Process:
        while True:
            size = min(BATCH_MAX, len(urgent) + len(patient))
            if not size:
                idle.append(woken := env.event())
                yield woken
                continue
            first = min(size, len(urgent))
            came = [urgent.popleft() for _ in range(first)], [patient.popleft() for _ in range(size - first)]
            if case.waits:
                for kind in (0, 1):
                    waits[kind].extend(env.now - came_s for came_s in came[kind])
            yield env.timeout(-mean_s[size] * log(1.0 - draw()))

    def source() -> Process:
        for _ in range(case.requests):
            yield env.timeout(-gap_s * log(1.0 - draw()))
            queues[draw() < 0.5].append(env.now)
            if idle:
                idle.popleft().succeed()

    env.process(source())
    for _ in range(case.servers):
        env.process(server())
    env.run()
    return {"urgent": waits[0], "patient": waits[1]}


if __name__ == "__main__":
    main(
        {
            (MANY_SERVERS, "resource"): resource,
            (MANY_SERVERS, "store"): store,
            (MANY_SERVERS, "by-hand"): by_hand,
            (BATCHING, "by-hand"): batching,
        }
    )
