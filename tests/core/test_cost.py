"""What the core does for a request and for a replica, counted, so that a regression shows without a clock.

The bounds are a few per cent above the counts on CPython 3.11. A change that exceeds them makes every request of the
live server and of the simulator more expensive: justify a higher bound, or find the line.
"""

import gc
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest

from sloop.actions import StartBatch, StartWorker
from sloop.core import Core
from sloop.events import WOKE, Finished, WorkerReady
from sloop.units import ms, s
from sloop.vocabulary import Node, ReplicaId
from tests.core.scene import Scene, plan_of, request
from tests.counting import calls_of, instructions_of

CALLS_A_REQUEST = 18
INSTRUCTIONS_A_REQUEST = 850
CALLS_A_BATCH_OF_EIGHT = 70
CALLS_A_REPLICA = 70
CALLS_A_NODE = 5
"""Once, to set it up and to make its first view."""


def warm(replicas: int, batch_max: int = 1, nodes: int = 1) -> Scene:
    """A core whose replicas are ready and idle, on nodes that they fill."""
    cores = replicas / nodes
    own = tuple(Node(f"n{number}", "local", cores, memory_bytes=10**9) for number in range(nodes))
    scene = Scene(plan_of(replicas, batch_max=batch_max), nodes=own)
    begin(scene.core)
    return scene


def begin(core: Core) -> None:
    """The first tick; every replica that it starts is ready at once."""
    for action in core.handle(0, WOKE):
        if isinstance(action, StartWorker):
            core.handle(0, WorkerReady(action.worker))


def served(core: Core, count: int, *, together: int = 1, at_ns: int = ms(1)) -> Callable[[], None]:
    """A function that serves `count` batches one after the other, each of `together` requests of one instant."""
    handle = core.handle
    batches = [[request(batch * together + i, at_ms=at_ns / ms(1)) for i in range(together)] for batch in range(count)]

    def serve() -> None:
        for *others, last in batches:
            for other in others:
                handle(at_ns, other, True)
            start = handle(at_ns, last)[-1]
            assert isinstance(start, StartBatch)
            assert len(start.requests) == together
            handle(at_ns, Finished(start.batch, start.replica, at_ns))

    return serve


def test_a_request_costs_few_calls() -> None:
    calls = calls_of(served(warm(4).core, 100))
    assert calls.total() <= 100 * CALLS_A_REQUEST, calls.most_common()
    asked = {name: count for name, count in calls.items() if name.partition(".")[2] in ("choose", "decide", "key")}
    assert max(asked.values()) <= 100, f"policies are asked once for each request: {asked}"


def test_a_request_costs_few_instructions() -> None:
    core = warm(4).core
    served(core, 10)()
    found = instructions_of(served(core, 100))
    assert found <= 100 * INSTRUCTIONS_A_REQUEST, f"{found / 100} for each request"


def test_a_batch_of_eight_costs_fewer_calls_than_eight_batches() -> None:
    calls = calls_of(served(warm(4, batch_max=8).core, 100, together=8))
    assert calls.total() <= 100 * CALLS_A_BATCH_OF_EIGHT, calls.most_common()


def test_costs_do_not_grow_with_idle_replicas() -> None:
    few, many = (calls_of(served(warm(count).core, 100)).total() for count in (4, 400))
    assert many <= few + 10


def test_starting_replicas_is_linear_in_them() -> None:
    few, many = (calls_of(partial(warm, count)).total() for count in (50, 400))
    assert (many - few) / 350 <= CALLS_A_REPLICA


def test_what_the_garbage_collector_calls_is_not_counted() -> None:
    """Hypothesis adds such a callback, so the count depended on which tests had run before."""

    def allocate() -> list[list[int]]:
        return [[] for _ in range(100_000)]

    alone = calls_of(allocate)
    gc.callbacks.append(lambda phase, info: None)
    try:
        assert calls_of(allocate) == alone
    finally:
        gc.callbacks.pop()


def test_starting_a_replica_costs_the_same_on_many_nodes() -> None:
    few, many = (calls_of(partial(warm, 200, nodes=count)).total() for count in (10, 200))
    assert (many - few) / 190 <= CALLS_A_NODE


@pytest.mark.parametrize("busy", [0, 3])
def test_a_tick_costs_nothing_for_replicas_and_nodes_that_have_not_changed(busy: int) -> None:
    def tick(replicas: int) -> Counter[str]:
        core = warm(replicas, nodes=replicas).core
        core.handle(s(1), WOKE)
        for number in range(busy):
            core.handle(ms(1_500), request(number, at_ms=1_500))
        return calls_of(partial(core.handle, s(2), WOKE))

    few, many = tick(10), tick(400)
    assert many == few


def test_a_tick_costs_nothing_for_batches_that_were_looked_at_before() -> None:
    """Batches of a minute run on all replicas; they cannot be stalled yet."""

    def tick(replicas: int) -> Counter[str]:
        scene = warm(replicas)
        scene.beliefs["only", "a", ""].times = 5_000.0
        core = scene.core
        core.handle(s(1), WOKE)
        for number in range(replicas):
            core.handle(ms(1_500), request(number, at_ms=1_500, slo_ms=600_000))
        assert len(core.state.applications[""].stages["only"].pool.running) == replicas
        core.handle(s(2), WOKE)
        core.handle(s(3), WOKE)
        return calls_of(partial(core.handle, s(4), WOKE))

    assert tick(400) == tick(10)


def test_memory_does_not_grow_with_requests() -> None:
    """One request a second for longer than any window, then for as long again."""
    scene, blocks = warm(1), []
    core = scene.core
    for second in range(1, 1_801):
        core.handle(s(second), WOKE)
        served(core, 1, at_ns=s(second))()
        if second in (900, 1_800):
            scene.script.seen.clear()
            scene.beliefs["only", "a", ""].observed.clear()
            blocks.append(sys.getallocatedblocks())
    assert blocks[1] - blocks[0] < 200
    assert core.state.applications[""].stages["only"].pool.replicas[ReplicaId(0)].batches == 1_800
