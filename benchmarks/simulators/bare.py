"""The upper limit of speed: the same queues as a loop over a heap, all in local variables, without any options.

It has random draws, a heap and a queue, and no event objects, policies or log.
"""

from collections import deque
from heapq import heappop, heappush
from math import log
from random import Random

from benchmarks.simulators.setting import BATCH_MAX, BATCHING, MANY_SERVERS, SERVICE_S, Case, Waits, batch_s, main


def many_servers(case: Case) -> Waits:
    draw = Random(case.seed).random
    gap_s, coming, idle, sequence = 1 / case.rate_rps, case.requests, case.servers, 0
    heap: list[tuple[float, int, bool]] = [(0.0, 0, True)]
    queue: deque[float] = deque()
    waits: list[float] = []
    while heap:
        now_s, _, arrives = heappop(heap)
        if arrives:
            queue.append(now_s)
            coming -= 1
            if coming:
                sequence += 1
                heappush(heap, (now_s - gap_s * log(1.0 - draw()), sequence, True))
        else:
            idle += 1
        if idle and queue:
            idle -= 1
            came_s = queue.popleft()
            if case.waits:
                waits.append(now_s - came_s)
            sequence += 1
            heappush(heap, (now_s - SERVICE_S * log(1.0 - draw()), sequence, False))
    return {"all": waits}


def batching(case: Case) -> Waits:
    draw = Random(case.seed).random
    gap_s, coming, idle, sequence = 1 / case.rate_rps, case.requests, case.servers, 0
    mean_s = [batch_s(size) for size in range(BATCH_MAX + 1)]
    heap: list[tuple[float, int, bool]] = [(0.0, 0, True)]
    urgent: deque[float] = deque()
    patient: deque[float] = deque()
    waits: tuple[list[float], list[float]] = ([], [])
    while heap:
        now_s, _, arrives = heappop(heap)
        if arrives:
            (urgent if draw() < 0.5 else patient).append(now_s)
            coming -= 1
            if coming:
                sequence += 1
                heappush(heap, (now_s - gap_s * log(1.0 - draw()), sequence, True))
        else:
            idle += 1
        if idle and (urgent or patient):
            idle -= 1
            size = 0
            while size < BATCH_MAX and (urgent or patient):
                came_s = urgent.popleft() if (first := bool(urgent)) else patient.popleft()
                if case.waits:
                    waits[not first].append(now_s - came_s)
                size += 1
            sequence += 1
            heappush(heap, (now_s - mean_s[size] * log(1.0 - draw()), sequence, False))
    return {"urgent": waits[0], "patient": waits[1]}


if __name__ == "__main__":
    main({(MANY_SERVERS, "plain"): many_servers, (BATCHING, "plain"): batching})
