"""Adaptive batches, against Algorithm 3 of AsyFunc as our specification corrects it (section 2.9), for one idle replica
at a time: the smallest."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.actions import Action, End, StartBatch
from sloop.events import WOKE
from sloop.policies.batch import Adaptive
from sloop.policies.drop import Never
from sloop.policies.order import Fifo
from sloop.policies.route import Smallest
from sloop.units import FOREVER_NS, ms
from sloop.vocabulary import Group, Node, Outcome, Plan, ReplicaSpec, Request, Slot, StagePlan
from tests.core.scene import Scene, request

CORES = (1.0, 2.0, 4.0)
LIMITS = (1, 3, 6)
SLO_MS = 20.0
"""A batch of n takes (10 + n)/c ms: 11 on one core; 6.5 for three on two; 4 for six on four."""


def scene_of(places: list[int], **options: Any) -> Scene:
    """Idle replicas of these sizes."""
    groups = tuple(Group(ReplicaSpec("only", "a", Slot(CORES[at])), places.count(at), LIMITS[at]) for at in (0, 1, 2))
    plan = Plan((StagePlan("only", groups, 8),), "why")
    policies: dict[str, Any] = {"order": Fifo(), "batch": Adaptive(**options), "route": Smallest(), "drop": Never()}
    scene = Scene(plan, nodes=(Node("n0", "local", 64, 10**9),), **policies)
    scene.warm_up()
    return scene


def together(scene: Scene, at_ms: float, requests: list[Request]) -> list[Action]:
    """What follows from requests of one instant."""
    *others, last = requests
    actions = [action for other in others for action in scene.core.handle(ms(at_ms), other, True)]
    return actions + scene.core.handle(ms(at_ms), last)


def algorithm_3(now_ns: int, sent_ns: list[int], idle: list[int]) -> tuple[list[tuple[int, list[int]]], list[int], int]:
    """The batches with the place of their replica, what is dropped, and when to look again."""
    slo_ns, queue, at, dropped = ms(SLO_MS), list(range(len(sent_ns))), min(idle), list[int]()

    def taken_ns(oldest: int, count: int) -> int:
        return now_ns - sent_ns[oldest] + ms((10 + count) / CORES[at])

    while queue:
        count = len(queue)
        if count <= LIMITS[at] and (due_ns := taken_ns(queue[0], count)) <= slo_ns:
            if due_ns * (count + 1) <= slo_ns * count and count < LIMITS[at]:
                return [], dropped, now_ns + slo_ns * count // (count + 1) - due_ns + 1
            return [(at, queue)], dropped, FOREVER_NS
        fits = [n for n in range(1, min(count, LIMITS[at]) + 1) if taken_ns(queue[-n], n) <= slo_ns]
        kept = max(fits, default=0)  # the newest alone is dropped too where it would be late
        dropped += queue[: count - kept]
        queue = queue[count - kept :]
    return [], dropped, FOREVER_NS


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=4),
    st.lists(st.floats(0, 22), min_size=1, max_size=12),
)
def test_what_adaptive_scheduling_starts_drops_and_waits_for(places: list[int], ages_ms: list[float]) -> None:
    scene, at_ms = scene_of(places), 1000.0
    ages_ms = sorted(ages_ms, reverse=True)
    arrived = [request(at, at_ms=at_ms, slo_ms=SLO_MS, elapsed_ms=age) for at, age in enumerate(ages_ms)]
    replicas = scene.core.state.replicas
    actions = together(scene, at_ms, arrived)
    batches, dropped, wait_ns = algorithm_3(ms(at_ms), [each.sent_ns for each in arrived], places)
    started = [(replicas[each.replica].cores, list(each.requests)) for each in actions if isinstance(each, StartBatch)]
    assert started == [(CORES[at], requests) for at, requests in batches]
    ended = [each.request for each in actions if isinstance(each, End) and each.outcome is Outcome.DROPPED]
    assert ended == dropped
    if wait_ns < FOREVER_NS and not batches:
        assert scene.core.wake_ns <= wait_ns
        later = scene.core.handle(wait_ns, WOKE)
        assert any(isinstance(each, StartBatch) for each in later), "it fires at its instant"


def test_a_lull_starves_nobody() -> None:
    """One request on two cores, 5.5 ms: it starts when half of the SLO has passed."""
    scene = scene_of([1])
    assert scene.act(1000, request(1, at_ms=1000, slo_ms=SLO_MS)) == []
    assert scene.core.wake_ns == ms(1000 + SLO_MS / 2 - 5.5) + 1


@pytest.mark.parametrize(("overflow", "served"), [("drop", [4, 5, 6, 7, 8, 9]), ("split", [0, 1, 2, 3, 4, 5])])
def test_more_than_a_replica_takes(overflow: str, served: list[int]) -> None:
    scene = scene_of([2], overflow=overflow)
    actions = together(scene, 1000, [request(at, at_ms=1000, slo_ms=SLO_MS) for at in range(10)])
    (start,) = [each for each in actions if isinstance(each, StartBatch)]
    assert list(start.requests) == served
    assert sum(isinstance(each, End) for each in actions) == (4 if overflow == "drop" else 0)
