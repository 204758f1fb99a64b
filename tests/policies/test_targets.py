"""Plans of equal replicas and the limits of what can be asked for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from sloop.core.views import ClusterView
from sloop.errors import InputError
from sloop.policies import targets
from sloop.solvers.budget import IndexedPath
from sloop.testing.views import make_belief, make_node, make_stage, make_view
from sloop.units import ms
from sloop.vocabulary import Group, NodeState, Path, ReplicaSpec, Slot, StagePlan

SMALL, LARGE = make_belief(variant="small"), make_belief(variant="large")
STAGE = make_stage(name="detect", beliefs=(SMALL, LARGE))


def test_the_first_variant_unless_another_is_wanted() -> None:
    assert targets.belief_of(STAGE) is SMALL
    assert targets.belief_of(STAGE, "large") is LARGE
    with pytest.raises(InputError, match="stage detect has no variant 'huge'\nhelp: use one of small, large"):
        targets.belief_of(STAGE, "huge")


# One kind of hardware

ON_CPU, ON_GPU = (make_belief(variant="v", hardware=kind) for kind in ("c5.2xlarge", "g4dn.xlarge"))
ONLY_GPU = make_belief(variant="v", hardware="g4dn.xlarge")
CPU, GPU = (make_node(kind, hardware=kind) for kind in ("c5.2xlarge", "g4dn.xlarge"))


def kinds_used(view: ClusterView) -> tuple[set[str], set[str]]:
    """The kinds of the nodes and of the beliefs."""
    return {node.node.hardware for node in view.nodes}, {kind for stage in view.stages for _, kind in stage.beliefs}


def test_the_first_kind_on_which_every_stage_has_a_variant() -> None:
    both, only = make_stage(name="both", beliefs=(ON_CPU, ON_GPU)), make_stage(name="only", beliefs=(ONLY_GPU,))
    assert kinds_used(targets.on_one_kind(make_view(both, nodes=(CPU, GPU)))) == ({"c5.2xlarge"}, {"c5.2xlarge"})
    assert kinds_used(targets.on_one_kind(make_view(both, nodes=(GPU, CPU)))) == ({"g4dn.xlarge"}, {"g4dn.xlarge"})
    assert kinds_used(targets.on_one_kind(make_view(both, only, nodes=(CPU, GPU)))) == (
        {"g4dn.xlarge"},
        {"g4dn.xlarge"},
    )


def test_a_named_kind() -> None:
    both, only = make_stage(name="both", beliefs=(ON_CPU, ON_GPU)), make_stage(name="only", beliefs=(ONLY_GPU,))
    view = make_view(both, nodes=(CPU, GPU))
    assert kinds_used(targets.on_one_kind(view, "g4dn.xlarge")) == ({"g4dn.xlarge"}, {"g4dn.xlarge"})
    with pytest.raises(InputError, match=r"no node has hardware 'c5'\nhelp: the cluster has c5.2xlarge and g4dn"):
        targets.on_one_kind(view, "c5")
    with pytest.raises(
        InputError, match=r"stage only has no profile for hardware 'c5.2xlarge'\nhelp: it has one for g"
    ):
        targets.on_one_kind(make_view(both, only, nodes=(CPU, GPU)), "c5.2xlarge")


def test_stages_without_a_common_kind() -> None:
    stages = make_stage(name="a", beliefs=(ON_CPU,)), make_stage(name="b", beliefs=(ONLY_GPU,))
    with pytest.raises(
        InputError, match=r"profile for every stage: a has c5.2xlarge; b has g4dn.xlarge\nhelp: add pro"
    ):
        targets.on_one_kind(make_view(*stages, nodes=(CPU, GPU)))


def test_a_kind_of_which_other_applications_need_all_nodes() -> None:
    stage = make_stage(name="s", beliefs=(ON_CPU, ON_GPU))
    assert targets.kind_of(make_view(stage, nodes=(CPU,)), "g4dn.xlarge", (stage,)) == "g4dn.xlarge"
    only = make_stage(name="s", beliefs=(ONLY_GPU,))
    assert targets.kind_of(make_view(only, nodes=(CPU,)), "", (only,)) == "g4dn.xlarge"


def test_lost_nodes_are_left_out_unless_all_are_lost() -> None:
    there, lost = make_node("a", state=NodeState.RELEASED), make_node("b", state=NodeState.LOST)
    assert targets.on_one_kind(make_view(STAGE, nodes=(there, lost))).nodes == (there,)
    assert targets.on_one_kind(make_view(STAGE, nodes=(lost,))).nodes == (lost,)
    unknown = make_stage(name="s", beliefs=(make_belief(hardware=""),))
    assert targets.on_one_kind(make_view(unknown, nodes=())).stages == (unknown,)


def test_a_variant_that_another_kind_has() -> None:
    stage = make_stage(name="s", beliefs=(ON_CPU, make_belief(variant="w", hardware="g4dn.xlarge")))
    view = targets.on_one_kind(make_view(stage, nodes=(CPU, GPU)))
    with pytest.raises(InputError, match="stage s has no variant 'w'\nhelp: use one of v"):
        targets.belief_of(view.stages[0], "w")
    assert targets.belief_of(stage, "w", "g4dn.xlarge").hardware == "g4dn.xlarge"
    with pytest.raises(InputError, match=r"stage s has no variant 'w' on c5.2xlarge\nhelp: use one of v"):
        targets.belief_of(stage, "w", "c5.2xlarge")


# Values for single stages


@pytest.mark.parametrize(
    ("stage", "declared", "expected"),
    [
        ("detect", {"detect": 1}, 1),
        ("detect", {"read": 1}, None),
        ("shop/detect", {"detect": 1}, 1),
        ("shop/detect", {"shop/detect": 2, "detect": 1}, 2),
        ("shop@2/detect", {"shop/detect": 2, "detect": 1}, 2),
        ("shop@2/detect", {"shop@2/detect": 3, "shop/detect": 2}, 3),
        ("shop/detect", {"ocr/detect": 1}, None),
    ],
)
def test_a_stage_s_own_value(stage: str, declared: dict[str, int], expected: int | None) -> None:
    assert targets.declared_for(make_stage(name=stage), declared) == expected


@pytest.mark.parametrize(
    ("stage", "declared", "is_known"),
    [
        ("detect", "detect", True),
        ("detect", "read", False),
        ("detect", "shop/detect", False),
        ("shop/detect", "detect", True),
        ("shop/detect", "shop/detect", True),
        ("shop@2/detect", "shop/detect", True),
        ("shop/detect", "read", False),
        ("shop/detect", "shop/read", False),
        ("shop/detect", "ocr/read", True),
    ],
)
def test_values_for_unknown_stages_are_refused(stage: str, declared: str, is_known: bool) -> None:
    view = make_view(make_stage(name=stage))
    if is_known:
        targets.check_stages(view, {declared: 1}, "stages")
    else:
        with pytest.raises(
            InputError, match=f"stages: no stage '{declared}'\nhelp: the application's stages are {stage}"
        ):
            targets.check_stages(view, {declared: 1}, "stages")


# Plans of equal replicas


@pytest.mark.parametrize(("asked", "given"), [(0, 5), (4, 4), (99, 16)])
def test_batches_stay_within_the_profile_and_unless_told_within_half_the_slo(asked: int, given: int) -> None:
    planned = targets.equal_replicas(STAGE, SMALL, count=3, cores=2, batch_max=asked)
    spec = ReplicaSpec("detect", "small", Slot(2, "local"))
    assert planned == StagePlan("detect", (Group(spec, 3),), given)


@dataclass
class Table:
    """Durations in ms of batches of 1, 2, …"""

    costs_ms: Sequence[float]
    batch_max: int = 4

    def slot(self, cores: float) -> Slot:
        return Slot(cores, "local")

    def costs_ns(self, slot: Slot) -> Sequence[int]:
        return [0, *map(ms, self.costs_ms)]


@pytest.mark.parametrize(
    ("costs_ms", "expected"),
    [
        ((60, 110, 160, 210), 4),
        ((60, 110, 160, 260), 3),  # more than half of the SLO
        ((300, 310, 320, 330), 1),
        ((50, 60, 160, 210), 2),  # larger ones serve fewer rows per second
        ((50, 100, 150, 200), 4),
        ((50, 98, 150, 201), 4),  # about as many
    ],
)
def test_batches_are_no_larger_than_serves_most_rows(costs_ms: Sequence[float], expected: int) -> None:
    belief: Any = Table(costs_ms)
    assert targets.largest_batch(make_stage(slo_ms=500), belief, 1.0, 0) == expected
    assert targets.largest_batch(STAGE, belief, 1.0, 4) == 4


def test_the_largest_node_bounds_a_replica() -> None:
    nodes = tuple(make_node(name, cores=cores) for name, cores in (("a", 4.0), ("b", 16.0)))
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
        return targets.core_choices(make_view(STAGE, nodes=(make_node(cores=node_cores),)), offered, 3, "vpa")

    assert choices(2) == [1, 2]
    assert choices(16) == [1, 2, 3]
    assert choices(0.5) == [0.5]
    assert choices(2, 4, 1.5, 1.5, 0.5) == [0.5, 1.5]
    with pytest.raises(InputError, match=r"system vpa: no core count of \(4,\) fits\nhelp: a node has 2 cores"):
        choices(2, 4)


def test_hysteresis_goes_up_at_once_and_down_when_all_agree() -> None:
    recent, kept = tuple[int, ...](), list[int]()
    for count in (1, 3, 2, 1, 1):
        most, recent = targets.largest(recent, count, 2, float)
        kept.append(most)
    assert kept == [1, 3, 3, 2, 1]


def test_a_pipeline_is_refused_by_those_that_serve_one_model() -> None:
    assert targets.one_stage(make_view(STAGE, nodes=()), "mine") is STAGE
    with pytest.raises(InputError, match="scale policy mine serves one model, and the application has 2 stages"):
        targets.one_stage(make_view(STAGE, STAGE, nodes=()), "mine")
