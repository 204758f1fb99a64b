"""Where replicas would be, and why they have no room."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from sloop.core.views import NodeView
from sloop.systems.planning.answer import Lack
from sloop.systems.planning.placed import cores_of, placed
from sloop.systems.planning.steady import steady_plan
from sloop.vocabulary import ReplicaSpec
from tests.systems.planning.scene import nodes, setup, stage


def lacking(cluster: dict[str, Any], **system: Any) -> Lack | None:
    made = setup(stage("a"), cluster=cluster, system={"name": "static", **system})
    return next(iter(placed(steady_plan(made, 1).plan, made).lacks), None)


def test_everything_has_room() -> None:
    made = setup(stage("a"), stage("b", "a"), system={"name": "static", "replicas": 2})
    plan = steady_plan(made, 1).plan
    assert cores_of(plan) == 4
    found = placed(plan, made)
    assert (found.lacks, found.used) == ([], {"custom-0"})
    assert not found.crowded


@pytest.mark.parametrize(
    ("cluster", "system", "said", "by"),
    [
        (nodes(4, 1), {"cores": 8}, "1 of 1 replicas of a/a with 8 cores: the largest node has 4, 4 too few", 4),
        (nodes(4, 1, 10), {}, "it takes 9.31e-07 GiB, and the largest node has 9.31e-09", 990),
        (
            nodes(4, 2),
            {"replicas": 11},
            "3 of 11 replicas of a/a with 1 core: the plan needs 11 cores, the cluster has 8: 3",
            3,
        ),
        (nodes(4, 2), {"replicas": 3, "cores": 2.5}, "what is free is in pieces", 0),
    ],
)
def test_what_has_no_room_says_why(cluster: dict[str, Any], system: dict[str, Any], said: str, by: float) -> None:
    lack = lacking(cluster, **system)
    assert lack is not None
    assert said in lack.why
    assert lack.by == pytest.approx(by)
    assert lack.stage == "a"


class Third:
    """Goes by a name."""

    def choose(self, now_ns: int, spec: ReplicaSpec, memory_bytes: int, nodes: Sequence[NodeView]) -> str | None:
        return next((node.node.name for node in nodes if node.node.name == "custom-2"), None)


def test_a_place_policy_that_goes_by_names_gets_to_see_them() -> None:
    made = setup(stage("a"), cluster=nodes(4, 4), system="static")
    system = replace(made.system, policies=replace(made.system.policies, place=Third()))
    found = placed(steady_plan(made, 1).plan, replace(made, system=system))
    assert (found.lacks, found.used) == ([], {"custom-2"})


def test_a_large_cluster_is_shown_once_for_each_state() -> None:
    """Of 500 nodes alike a place policy sees at most the whole, the part-filled and the full."""
    seen: list[int] = []

    class Counting(Third):
        def choose(self, now_ns: int, spec: ReplicaSpec, memory_bytes: int, nodes: Sequence[NodeView]) -> str | None:
            seen.append(len(nodes))
            return next((node.node.name for node in nodes if node.free_cores >= spec.cores), None)

    made = setup(stage("a"), cluster=nodes(2, 500), system={"name": "static", "replicas": 900})
    system = replace(made.system, policies=replace(made.system.policies, place=Counting()))
    found = placed(steady_plan(made, 1).plan, replace(made, system=system))
    assert (found.lacks, len(found.used)) == ([], 450)
    assert max(seen) == 3
