"""Where replicas would be, and why they have no room."""

from typing import Any

import pytest

from sloop.systems.planning.answer import Lack
from sloop.systems.planning.placed import cores_of, placed
from sloop.systems.planning.steady import steady_plan
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
