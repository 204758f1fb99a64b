"""Limits of the machine that change while a server runs."""

import asyncio
import logging
from collections.abc import Iterator, Sequence

import pytest
from msgspec import structs

from sloop.app.hardware import ANY_BYTES
from sloop.machine import Capacity
from sloop.serve.machine_watch import refitted, watch
from sloop.units import GIB
from sloop.vocabulary import Node

BEGUN = Capacity(4.0, 8 * GIB, "/cpu.max", "/memory.max")
WHOLE = Node("local-0", "local", 4.0, 8 * GIB)


def capacities(nodes: Sequence[Node]) -> list[tuple[float, int]]:
    return [(node.cores, node.memory_bytes) for node in nodes]


@pytest.mark.parametrize(("cores", "memory_bytes"), [(1.5, GIB), (0.001, 1), (16.0, 64 * GIB)])
def test_a_node_that_is_the_whole_machine_is_what_that_becomes(cores: float, memory_bytes: int) -> None:
    assert capacities(refitted([WHOLE], BEGUN, Capacity(cores, memory_bytes))) == [(cores, memory_bytes)]


def test_a_declared_node_is_never_larger_than_declared() -> None:
    part = structs.replace(WHOLE, cores=2.0, memory_bytes=2 * GIB)
    assert capacities(refitted([part], BEGUN, Capacity(8.0, 9 * GIB))) == [(2.0, 2 * GIB)]
    assert capacities(refitted([part], BEGUN, Capacity(1.5, GIB))) == [(1.5, GIB)]


def test_nodes_of_one_machine_shrink_in_proportion() -> None:
    nodes = [Node("a", "rack", 1.0, ANY_BYTES), Node("b", "rack", 3.0, ANY_BYTES)]
    assert capacities(refitted(nodes, BEGUN, Capacity(3.0, GIB))) == [(0.75, ANY_BYTES), (2.25, ANY_BYTES)]
    assert capacities(refitted(nodes, BEGUN, Capacity(9.0, GIB))) == [(1.0, ANY_BYTES), (3.0, ANY_BYTES)]


def test_each_change_is_told_once_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    seen = [BEGUN, Capacity(1.0, GIB, "/cpu.max", "/memory.max"), Capacity(1.0, GIB, "/other", ""), BEGUN, BEGUN]
    looks: Iterator[Capacity] = iter(seen)
    told: list[tuple[float, list[tuple[float, int]]]] = []

    def look() -> Capacity:
        found = next(looks, None)
        if found is None:
            raise LookupError("the test is over")
        return found

    def on_change(nodes: Sequence[Node], cores: float) -> None:
        told.append((cores, capacities(nodes)))

    with caplog.at_level(logging.WARNING), pytest.raises(LookupError):
        asyncio.run(watch([WHOLE], on_change, BEGUN, look, every_s=0))
    assert told == [(1.0, [(1.0, GIB)]), (4.0, [(4.0, 8 * GIB)])]
    assert [record.getMessage() for record in caplog.records] == [
        "this machine has 1 core and 1 GiB of memory now: "
        "limited to 1 core by /cpu.max and 1 GiB of memory by /memory.max",
        "this machine has 4 cores and 8 GiB of memory now: "
        "limited to 4 cores by /cpu.max and 8 GiB of memory by /memory.max",
    ]
