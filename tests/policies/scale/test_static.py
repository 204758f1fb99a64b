"""The same cluster always, of one kind of hardware or of several."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from sloop.app.load import load_application, load_deployment
from sloop.core.views import ClusterView, StageView
from sloop.errors import InputError
from sloop.options import check_ranges
from sloop.policies.scale.static import Static, StaticGroup, StaticPlacement, StaticStage
from sloop.profile.profile import Profile, Quadratic
from sloop.systems.planning import explain_plan
from sloop.systems.registry import build
from sloop.systems.setup import set_up
from sloop.testing.views import make_belief, make_node, make_stage, make_view
from sloop.vocabulary import Group, ReplicaSpec, Slot, StagePlan
from tests.asked import next_plan


def on(hardware: str, cores: float, stage: str = "stage", variant: str = "v") -> ReplicaSpec:
    return ReplicaSpec(stage, variant, Slot(cores, hardware))


def test_the_same_for_every_stage_but_where_it_says_otherwise(
    stage: Callable[..., StageView], view: Callable[..., ClusterView]
) -> None:
    policy = Static(replicas=2, cores=8, stages={"second": StaticStage(cores=0.5, batch_max=1)})
    plan = next_plan(policy, 0, view(stage(name="first"), stage(name="second")))
    assert plan is not None
    assert plan.feasible
    assert plan.stages == (
        StagePlan("first", (Group(on("local", 8, "first"), 2),), 11),
        StagePlan("second", (Group(on("local", 0.5, "second"), 2),), 1),
    )


# Several kinds of hardware

FAST = Profile(latency_ms=Quadratic(0, 1, 9), max_batch=64, max_cores=4, accelerator="T4")
SLOW = Profile(latency_ms=Quadratic(0, 20, 80), max_batch=16, max_cores=8)
CPU, GPU = make_node("c", hardware="c5.2xlarge"), make_node("g", hardware="g4dn.xlarge", devices={"gpu0": 1.0})


def kinds(name: str = "stage", *, cpu: bool = True, gpu: bool = True) -> StageView:
    beliefs = [make_belief(SLOW, hardware="c5.2xlarge")] * cpu + [make_belief(FAST, hardware="g4dn.xlarge")] * gpu
    return make_stage(name=name, beliefs=beliefs, slo_ms=400)


def test_a_fixed_mix_of_kinds() -> None:
    policy = Static(
        cores=4,
        stages={
            "stage": StaticStage(
                groups=(
                    StaticGroup(hardware="c5.2xlarge", replicas=2, cores=8),
                    StaticGroup(hardware="g4dn.xlarge", batch_max=32),
                    StaticGroup(hardware="g4dn.xlarge", replicas=3, cores=1),
                )
            )
        },
    )
    plan = next_plan(policy, 0, make_view(kinds(), nodes=(CPU, GPU)))
    assert plan is not None
    gpu = Slot(4, "g4dn.xlarge", "T4")
    assert plan.stages == (
        StagePlan(
            "stage",
            (
                Group(on("c5.2xlarge", 8), 2, batch_max=6),
                Group(ReplicaSpec("stage", "v", gpu), 1, batch_max=32),
                Group(ReplicaSpec("stage", "v", structs.replace(gpu, cores=1)), 3, batch_max=64),
            ),
            64,
        ),
    )


def test_one_kind_for_all_stages_or_one_for_each() -> None:
    def used(policy: Static, *stages: StageView) -> list[str]:
        plan = next_plan(policy, 0, make_view(*stages, nodes=(CPU, GPU)))
        assert plan is not None
        return [target.groups[0].spec.slot.hardware for target in plan.stages]

    both = (kinds("a"), kinds("b"))
    assert used(Static(), *both) == ["c5.2xlarge"] * 2
    assert used(Static(hardware="g4dn.xlarge"), *both) == ["g4dn.xlarge"] * 2
    own = {"b": StaticStage(hardware="g4dn.xlarge")}
    assert used(Static(stages=own), *both) == ["c5.2xlarge", "g4dn.xlarge"]
    assert used(Static(stages=own), kinds("a", gpu=False), kinds("b", cpu=False)) == ["c5.2xlarge", "g4dn.xlarge"]
    with pytest.raises(InputError, match="no kind of hardware has a profile for every stage: a has c5"):
        used(Static(), kinds("a", gpu=False), kinds("b", cpu=False))
    with pytest.raises(InputError, match=r"stage a has no profile for hardware 'g4dn.xlarge'"):
        used(Static(hardware="g4dn.xlarge"), kinds("a", gpu=False))


def test_mistakes_in_groups_are_named() -> None:
    view = make_view(kinds(), nodes=(CPU, GPU))

    def static(*groups: StaticGroup) -> Static:
        return Static(stages={"stage": StaticStage(groups=groups)})

    with pytest.raises(InputError, match=r"no node has hardware 'c4.large'\nhelp: the cluster has c5.2xlarge and g4dn"):
        next_plan(static(StaticGroup(hardware="c4.large")), 0, view)
    with pytest.raises(InputError, match=r"stage stage has no variant 'w' on g4dn.xlarge"):
        next_plan(static(StaticGroup(hardware="g4dn.xlarge", variant="w")), 0, view)
    with pytest.raises(InputError, match="two groups of stage stage are the same replicas of v"):
        next_plan(static(StaticGroup(), StaticGroup(hardware="c5.2xlarge", batch_max=2)), 0, view)
    with pytest.raises(InputError, match="both 'replicas' and 'groups'"):
        StaticStage(replicas=2, groups=(StaticGroup(),))
    with pytest.raises(InputError, match=r"stages\.stage\.groups\[0\]\.cores: must be a number above 0"):
        build("scale", "static", {"stages": {"stage": {"groups": [{"cores": 0}]}}})


def test_a_stage_that_is_not_there_is_named(stage: Callable[..., StageView], view: Callable[..., ClusterView]) -> None:
    with pytest.raises(InputError, match="no stage 'third'\nhelp: the application's stages are stage"):
        next_plan(Static(stages={"third": StaticStage()}), 0, view(stage()))


@pytest.mark.parametrize(
    "policy",
    [
        lambda: Static(replicas=-1),
        lambda: Static(replicas=100_001),
        lambda: Static(cores=0),
        lambda: Static(cores=1e300),
        lambda: Static(batch_max=-1),
        lambda: Static(stages={"stage": StaticStage(cores=-1)}),
    ],
)
def test_refuses_what_cannot_be(policy: Callable[[], Static]) -> None:
    with pytest.raises(InputError, match="must be"):
        check_ranges(policy())


# Placements


def placed_view(devices: float = 1.0) -> ClusterView:
    profile = Profile(
        latency_ms=Quadratic(0, 1, 5), max_batch=8, max_cores=2, accelerator="T4", device_memory_bytes=6 << 30
    )
    node = make_node("gpu-0", hardware="g4dn.xlarge", devices={"T4": devices}, memory_bytes=16 << 30)
    stages = [make_stage(name=name, beliefs=[make_belief(profile, "v", "g4dn.xlarge")]) for name in ("a", "b")]
    return make_view(*stages, nodes=[node], rates={"a": 1.0, "b": 1.0})


def placement(stage: str, **changes: Any) -> StaticPlacement:
    values: dict[str, Any] = {"variant": "v", "node": "gpu-0", "device": "T4", "share": 0.5, "batch": 4, **changes}
    return StaticPlacement(stage, **values)


def test_placements_say_where_replicas_are() -> None:
    policy = Static(placements=(placement("a", rate_rps=10.0), placement("b", share=0.25, replicas=1)))
    plan = next_plan(policy, 0, placed_view())
    assert plan is not None
    (a,), (b,) = (target.groups for target in plan.stages)
    assert (a.spec.node, a.spec.device, a.spec.slot.share, a.batch_max, a.rate_rps) == ("gpu-0", "T4", 0.5, 4, 10.0)
    assert b.spec.slot == structs.replace(a.spec.slot, share=0.25)


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        (
            [placement("a", share=0.6), placement("b", share=0.6)],
            "no room for a replica of b on T4 of gpu-0: it needs 0.6 of the device, and 0.4 are left",
        ),
        (
            [placement("a", share=0, replicas=2), placement("b", share=0)],
            "no room for a replica of b on T4 of gpu-0: it needs 6 GiB of its memory, and 4 are left",
        ),
        ([placement("a", node="gpu-7")], "the cluster has no node 'gpu-7'"),
        ([placement("a", device="T4-1")], "node gpu-0 has no device 'T4-1'"),
        ([placement("a", device="")], "the profile of v is for T4 of gpu-0"),
        ([placement("c")], "placements: no stage 'c'"),
        ([placement("a", variant="w")], "stage a has no variant 'w'"),
        ([placement("a")], "none is for stage b, which would serve nothing"),
        ([placement("a", batch=2), placement("a")], "two are for the same replicas of a on T4 of gpu-0"),
        ([placement("a", hardware="p3.2xlarge")], "node gpu-0 is of hardware g4dn.xlarge, not p3.2xlarge"),
    ],
    ids=["shares", "memory", "node", "device", "cores", "stage", "variant", "forgotten", "twice", "hardware"],
)
def test_placements_that_do_not_fit_are_refused(placements: list[StaticPlacement], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        next_plan(Static(placements=tuple(placements)), 0, placed_view())


def test_a_share_above_the_whole_device_is_refused() -> None:
    with pytest.raises(InputError, match=r"share must be a number of at least 0 and at most 1, not 1\.2"):
        check_ranges(placement("a", share=1.2))


ON_V100 = {
    "latency_ms": {"form": "quadratic", "alpha": 0, "beta": 1, "gamma": 5},
    "max_batch": 16,
    "max_cores": 1,
    "accelerator": "V100",
    "device_memory_bytes": 1_000_000_000,
}


def test_a_plan_can_be_read_again(tmp_path: Path) -> None:
    """What `sloop plan --json` prints as placements is a placement file."""
    application = {
        "name": "shop",
        "slo_ms": 400,
        "stages": [{"name": "a", "profile": ON_V100}, {"name": "b", "profile": ON_V100}],
        "cluster": {"nodes": [{"hardware": "p3.2xlarge", "count": 2}]},
        "system": "harbor",
    }
    report = explain_plan(set_up(load_application(application)), 100.0)
    assert report.placements
    path = tmp_path / "placed.json"
    path.write_bytes(msgspec.json.encode(report))
    again = {**application, "system": {"name": "static", "placements": path.name}}
    found = explain_plan(set_up(load_application(again, folder=tmp_path)), 100.0)
    assert found.placements == report.placements
    path.write_text("{}")
    with pytest.raises(InputError, match="the placement file has no placements"):
        load_application(again, folder=tmp_path)


def test_placements_of_several_applications_must_fit_beside_each_other() -> None:
    def placed(name: str, share: float) -> dict[str, Any]:
        where = {"stage": "only", "variant": "only", "node": "p3.2xlarge-0", "device": "V100", "share": share}
        return {
            "name": name,
            "slo_ms": 400,
            "stages": [{"name": "only", "profile": ON_V100}],
            "system": {"name": "static", "placements": [where]},
        }

    def shop(share: float) -> dict[str, Any]:
        cluster = {"nodes": [{"hardware": "p3.2xlarge"}]}
        return {"name": "shop", "applications": [placed("a", 0.5), placed("b", share)], "cluster": cluster}

    assert set_up(load_deployment([shop(0.5)])).applications
    with pytest.raises(InputError, match=r"no room for a replica of b/only on V100 of p3\.2xlarge-0"):
        set_up(load_deployment([shop(0.6)]))


def test_a_placement_is_for_the_application_that_its_stage_names() -> None:
    """As in other options, `APPLICATION/STAGE` is ignored by the other applications."""

    def where(stage: str, node: int, **more: str) -> dict[str, Any]:
        return {"stage": stage, "variant": "only", "node": f"p3.2xlarge-{node}", "device": "V100", **more}

    applications = [{"name": name, "slo_ms": 400, "stages": [{"name": "only", "profile": ON_V100}]} for name in "ab"]
    for placements in (
        [where("a/only", 0), where("b/only", 1)],
        [where("only", 0, application="a"), where("only", 1, application="b")],
        [where("a/only", 0, application="a"), where("b/only", 1, application="b")],
    ):
        shop = {
            "name": "shop",
            "applications": applications,
            "cluster": {"nodes": [{"hardware": "p3.2xlarge", "count": 2}]},
            "system": {"name": "static", "placements": placements},
        }
        found = explain_plan(set_up(load_deployment([shop])), {"a": 1.0, "b": 1.0}).placements
        assert [(each.stage, each.node, each.replicas) for each in found] == [
            ("a/only", "p3.2xlarge-0", 1),
            ("b/only", "p3.2xlarge-1", 1),
        ]


def test_cores_that_are_only_reserved() -> None:
    groups = (StaticGroup(replicas=3, cores=0.5, is_capped=False), StaticGroup(cores=2))
    plan = next_plan(Static(stages={"stage": StaticStage(groups=groups)}), 0, make_view(kinds(), nodes=(CPU,)))
    assert plan is not None
    assert [(group.spec.slot, group.count) for group in plan.stages[0].groups] == [
        (Slot(0.5, "c5.2xlarge", is_capped=False), 3),
        (Slot(2, "c5.2xlarge"), 1),
    ]
    place = StaticPlacement("stage", "v", CPU.node.name, cores=0.5, is_capped=False)
    placed = next_plan(Static(placements=(place,)), 0, make_view(kinds(), nodes=(CPU,)))
    assert placed is not None
    assert placed.stages[0].groups[0].spec.slot == Slot(0.5, "c5.2xlarge", is_capped=False)
