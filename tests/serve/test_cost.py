"""What a request costs in the deciding process, and with an edge in it, counted in calls, so that a regression shows
without a clock.

The bounds stand some per cent above what is counted today on CPython 3.11.
"""

import asyncio
import gc
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.counting import calls_of
from tests.serve.path import Deciding, Way

CALLS_A_REQUEST = 77
DECIDING_CALLS_A_REQUEST = 45
CALLS_A_FRAME = 8
"""For one more edge whose requests come at the same time."""
REQUESTS = 32


def walked(folder: Path, rounds: int) -> tuple[Counter[str], list[int]]:
    """Calls of a whole run with so many rounds of `REQUESTS` at one time, and the status codes of all."""

    async def main() -> list[int]:
        way = Way(folder)
        await way.warm_up()
        for _ in range(rounds):
            await way.walk(REQUESTS)
        await way.close()
        return way.wire.statuses

    statuses: list[int] = []
    found = calls_of(lambda: statuses.extend(asyncio.run(main())))
    return found, statuses


def decided(folder: Path, rounds: int) -> Counter[str]:
    """Calls of the deciding process alone, with frames of `REQUESTS` requests each."""

    async def main() -> None:
        deciding = Deciding(folder)
        await deciding.warm_up()
        for number in range(rounds):
            await deciding.decide([deciding.recorded(REQUESTS, first=1 + number * REQUESTS)], REQUESTS)
        await deciding.close()

    return calls_of(lambda: asyncio.run(main()))


def test_a_request_costs_the_deciding_process_few_calls(tmp_path: Path) -> None:
    few, many = decided(tmp_path, 1), decided(tmp_path, 11)
    calls = (many - few).total() / (10 * REQUESTS)
    assert calls <= DECIDING_CALLS_A_REQUEST, (many - few).most_common(40)


@pytest.mark.parametrize(("edges", "replicas"), [(4, 32), (1, 256)])
def test_many_edges_and_workers_cost_the_deciding_process_little_more(
    tmp_path: Path, edges: int, replicas: int
) -> None:
    """Each request is a batch of its own."""

    def calls(edges: int, replicas: int) -> float:
        async def main(rounds: int) -> None:
            deciding, each = Deciding(tmp_path, edges=edges, replicas=replicas), REQUESTS // edges
            await deciding.warm_up()
            for _ in range(rounds):
                await deciding.decide(
                    [deciding.recorded(each, first=1 + edge * each) for edge in range(edges)], REQUESTS
                )
            await deciding.close()

        few, many = calls_of(lambda: asyncio.run(main(1))), calls_of(lambda: asyncio.run(main(11)))
        return (many - few).total() / (10 * REQUESTS)

    found, least = calls(edges, replicas), calls(1, 32)
    assert found <= least + CALLS_A_FRAME * (edges - 1) / REQUESTS + 1, (found, least)


def test_a_request_costs_few_calls(tmp_path: Path) -> None:
    few, statuses = walked(tmp_path, 1)
    many, more = walked(tmp_path, 11)
    assert set(statuses + more) == {200}
    assert len(more) == 11 * REQUESTS
    calls = (many - few).total() / (10 * REQUESTS)
    assert calls <= CALLS_A_REQUEST, (many - few).most_common(40)


def test_a_request_leaves_no_cycles_behind(tmp_path: Path) -> None:
    async def main() -> int:
        way = Way(tmp_path)
        await way.warm_up()
        await way.walk(REQUESTS)
        gc.collect()
        for _ in range(10):
            await way.walk(REQUESTS)
        found = gc.collect()
        await way.close()
        return found

    assert asyncio.run(main()) < REQUESTS


@pytest.mark.parametrize("module", ["sloop.serve.worker", "sloop.serve.edge.process", "sloop.serve.cluster.agent"])
def test_a_process_that_decides_nothing_imports_nothing_to_decide_with(module: str) -> None:
    """Core and policies take 0.2 s to import, a worker no longer than that in all."""
    rooms = "sloop.core", "sloop.policies", "sloop.solvers", "sloop.systems", "sloop.profile.published"
    code = f"import sys, {module}; print(*(name for name in sys.modules if name.startswith({rooms})))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not found.stdout.split()
