"""Plans of equal replicas and the limits of what can be asked for."""

from collections import deque

import pytest

from sloop.core.views import NodeView
from sloop.errors import InputError
from sloop.policies import targets
from sloop.profile.estimate import Estimate
from sloop.profile.published import YOLOV5S_S
from sloop.solvers.budget import IndexedPath
from sloop.units import ms
from sloop.vocabulary import Group, Node, Path, ReplicaSpec, StagePlan
from tests.policies.conftest import make_stage, make_view

STAGE = make_stage(name="detect", variants={"small": Estimate(YOLOV5S_S), "large": Estimate(YOLOV5S_S)})


def test_the_first_variant_unless_another_is_wanted() -> None:
    assert targets.variant_of(STAGE, "") == "small"
    assert targets.variant_of(STAGE, "large") == "large"
    with pytest.raises(InputError, match="stage detect has no variant 'huge'\nhelp: use one of small, large"):
        targets.variant_of(STAGE, "huge")


@pytest.mark.parametrize(("asked", "given"), [(0, 5), (4, 4), (99, 16)])
def test_batches_stay_within_the_profile_and_unless_told_within_half_the_slo(asked: int, given: int) -> None:
    planned = targets.equal_replicas(STAGE, "small", count=3, cores=2, batch_max=asked)
    assert planned == StagePlan("detect", (Group(ReplicaSpec("detect", "small", 2), 3),), given)


@pytest.mark.parametrize(("cores", "limit_ms", "expected"), [(2, 500, 5), (2, 9, 1), (16, 10_000, 16), (1, 166, 1)])
def test_the_largest_batch_within_a_time(cores: float, limit_ms: float, expected: int) -> None:
    assert targets.batch_within(STAGE.variants["small"], cores, ms(limit_ms)) == expected


def test_the_largest_node_bounds_a_replica() -> None:
    nodes = tuple(NodeView(Node(name, "local", cores, 1), 0, 0, {}) for name, cores in (("a", 4.0), ("b", 16.0)))
    assert targets.node_cores_max(make_view(STAGE, nodes=nodes)) == 16
    assert targets.node_cores_max(make_view(STAGE, nodes=())) == float("inf")


def test_each_path_keeps_its_own_deadline() -> None:
    stages = make_stage(name="detect"), make_stage(name="classify")
    paths = (Path(("detect", "classify"), ms(900)), Path(("classify",), ms(300)))
    assert targets.indexed_paths(make_view(*stages, paths=paths), 0.9) == (
        IndexedPath((0, 1), 810.0),
        IndexedPath((1,), 270.0),
    )


def test_cores_on_offer_end_with_the_largest_node() -> None:
    def choices(node_cores: float, *offered: float) -> list[float]:
        node = NodeView(Node("n", "local", node_cores, 1), 0, 0, {})
        return targets.core_choices(make_view(STAGE, nodes=(node,)), offered, 3, "vpa")

    assert choices(2) == [1, 2]
    assert choices(16) == [1, 2, 3]
    assert choices(0.5) == [0.5]
    assert choices(2, 4, 1.5, 1.5, 0.5) == [0.5, 1.5]
    with pytest.raises(InputError, match=r"system vpa: no core count of \(4,\) fits\nhelp: a node has 2 cores"):
        choices(2, 4)


def test_hysteresis_goes_up_at_once_and_down_when_all_agree() -> None:
    recent: deque[int] = deque()
    assert [targets.largest(recent, count, 2, float) for count in (1, 3, 2, 1, 1)] == [1, 3, 3, 2, 1]


def test_a_pipeline_is_refused_by_those_that_serve_one_model() -> None:
    assert targets.one_stage(make_view(STAGE, nodes=()), "sponge") is STAGE
    with pytest.raises(InputError, match="system sponge serves one model, and the application has 2 stages"):
        targets.one_stage(make_view(STAGE, STAGE, nodes=()), "sponge")
