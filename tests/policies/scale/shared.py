"""Nodes, stages and plans for policies that place models on shared devices."""

from typing import Any

from msgspec import structs

from sloop.app.hardware import ACCELERATORS
from sloop.core.ledger import Ledger, Reservation
from sloop.core.planner import check
from sloop.core.views import Bucket, ClusterView, DeviceView, NodeView, StageView
from sloop.profile.profile import Profile, Quadratic
from sloop.testing.views import make_belief, make_stage
from sloop.units import s
from sloop.vocabulary import Node, NodeState, Plan, ReplicaId
from tests.asked import next_plan

T4 = Profile(
    latency_ms=Quadratic(0.0, 1.0, 9.0), max_batch=16, max_cores=4, accelerator="T4", device_memory_bytes=1 << 30
)
CPU = Profile(latency_ms=Quadratic(0.0, 10.0, 20.0), max_batch=8, max_cores=8)


def rented(*kinds: tuple[str, int, float, str], count: int = 3) -> list[NodeView]:
    """Nodes on demand: kind, cores, price, accelerator."""
    found = []
    for hardware, cores, price, accelerator in kinds:
        devices = (ACCELERATORS[accelerator],) if accelerator else ()
        views = tuple(DeviceView(each, 1.0, each.memory_bytes, 48) for each in devices)
        for number in range(count):
            node = Node(f"{hardware}-{number}", hardware, cores, 32 << 30, devices, price, on_demand=True)
            found.append(NodeView(node, cores, 32 << 30, views, NodeState.RELEASED))
    return found


def v100_nodes(count: int, **changes: Any) -> list[NodeView]:
    """Nodes with 16 cores and one V100 each."""
    device = ACCELERATORS["V100"]
    found = []
    for number in range(count):
        node = Node(f"gpu-{number}", "p3.2xlarge", 16.0, 61 << 30, (device,), 3.06)
        node = structs.replace(node, **changes)
        found.append(NodeView(node, 16.0, 61 << 30, (DeviceView(device, 1.0, device.memory_bytes, 48),)))
    return found


def stage_of(name: str, slo_ms: float, *profiles: tuple[str, Profile]) -> StageView:
    beliefs = [make_belief(profile, name, hardware) for hardware, profile in profiles]
    return make_stage(Bucket(0, arrivals=1), name=name, beliefs=beliefs, slo_ms=slo_ms)


def planned(policy: Any, view: ClusterView, now_s: float = 0.0) -> Plan:
    plan: Plan | None = next_plan(policy, s(now_s), view)
    assert plan is not None
    check(plan, view)
    fits(plan, view)
    return plan


def fits(plan: Plan, view: ClusterView) -> None:
    """Every replica names its place, and together they fit: the ledger says so."""
    ledger = Ledger.all_ready([node.node for node in view.nodes])
    number = 0
    beliefs = {stage.name: stage.beliefs for stage in view.stages}
    for target in plan.stages:
        for group in target.groups:
            spec = group.spec
            assert group.count == 1
            assert spec.node is not None
            belief = beliefs[spec.stage][spec.variant, spec.slot.hardware]
            assert ledger.reserve(ReplicaId(number), Reservation.of(spec, belief, spec.node, spec.device)), spec
            number += 1


def contents(plan: Plan) -> list[list[str]]:
    """By device, `resnet50 b4`, in any order."""
    found: dict[tuple[str | None, str | None], list[str]] = {}
    for target in plan.stages:
        for group in target.groups:
            place = group.spec.node, group.spec.device
            found.setdefault(place, []).append(f"{target.stage} b{target.batch_max_of(group)}")
    return sorted(map(sorted, found.values()))
