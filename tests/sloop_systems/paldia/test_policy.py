"""The choice of hardware over time: published thresholds, hysteresis, failures, and the replicas of each sharing."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from sloop.app.hardware import KINDS
from sloop.core.ledger import Ledger
from sloop.core.views import Bucket, ClusterView, DeviceView, NodeView, ReplicaView
from sloop.errors import InputError
from sloop.options import OutOfRange
from sloop.profile.interference import CountLaw
from sloop.profile.profile import Amdahl, DeviceSharing, Profile
from sloop.profile.published import YOLOV5S_S
from sloop.systems.registry import build
from sloop.testing.views import make_belief, make_stage, make_view, make_visit
from sloop.units import s
from sloop.vocabulary import Group, Life, NodeState, Plan, ReplicaId, ReplicaSpec, Slot
from sloop_systems.paldia import solver
from sloop_systems.paldia.policy import Paldia
from sloop_systems.paldia.published import PALDIA_MODELS, paldia_profiles
from sloop_systems.paldia.solver import DeviceModel, HardwareRule
from tests.asked import next_plan

EC2 = ("m4.xlarge", "c6i.2xlarge", "c6i.4xlarge", "g3s.xlarge", "p2.xlarge", "p3.2xlarge")
M60, K80, V100 = EC2[3:]


def node_of(kind: str, lost: Sequence[str]) -> NodeView:
    node = KINDS[kind].node(f"{kind}-0")
    devices = tuple(DeviceView(device, 1.0, device.memory_bytes, device.clients_max) for device in node.devices)
    state = NodeState.LOST if kind in lost else NodeState.READY
    return NodeView(node, node.cores, node.memory_bytes, devices, state)


def view_of(
    rate_rps: float,
    *,
    model: str = "ResNet50",
    kinds: Sequence[str] = EC2,
    lost: Sequence[str] = (),
    ready: str = "",
    waiting: int = 0,
) -> ClusterView:
    """One node of each kind, a replica that is ready on `ready`, and a rate that was measured."""
    beliefs = [make_belief(own, "v", kind) for kind, own in paldia_profiles(model).items() if kind in kinds]
    running = [ReplicaView(ReplicaId(0), ReplicaSpec("stage", "v", Slot(1.0, ready)), Life.READY, 0, 0)]
    stage = make_stage(
        Bucket(0, arrivals=round(rate_rps)),
        beliefs=beliefs,
        slo_ms=200,
        queue=[make_visit(number) for number in range(waiting)],
        replicas=running if ready else [],
    )
    return make_view(stage, nodes=[node_of(kind, lost) for kind in kinds], rates={"stage": rate_rps})


def planned(policy: Paldia, view: ClusterView, now_s: float = 0) -> tuple[str, int, int]:
    """The kind of hardware, the number of replicas and the largest batch that the policy plans."""
    plan = next_plan(policy, s(now_s), view)
    assert plan is not None
    [target] = plan.stages
    [group] = target.groups
    return group.spec.slot.hardware, group.count, target.batch_max


def kind_of(policy: Paldia, view: ClusterView) -> str:
    return planned(policy, view)[0]


THRESHOLDS: list[tuple[str, HardwareRule, tuple[int, ...]]] = [
    ("ResNet50", "slo_first", (1, 5, 11, 21, 172, 236)),
    ("ResNet50", "tolerance", (1, 5, 11, 21, 57, 143)),
    ("VGG19", "slo_first", (1, 7, 16, 31, 259, 357)),
    ("VGG19", "tolerance", (1, 7, 16, 31, 138, 209)),
    ("SENet18", "slo_first", (1, 8, 18, 36, 319, 429)),
    ("DenseNet121", "slo_first", (1, 3, 7, 13, 143, 197)),
    ("BERT", "slo_first", (0, 0, 0, 1, 8, 13)),
]


@pytest.mark.parametrize(("model", "choice", "firsts"), THRESHOLDS)
def test_the_first_rate_for_each_kind(model: str, choice: HardwareRule, firsts: tuple[int, ...]) -> None:
    for kind, first in zip(EC2, firsts, strict=True):
        if first:
            assert kind_of(Paldia(choice=choice), view_of(first, model=model)) == kind
        if first > 1:
            assert kind_of(Paldia(choice=choice), view_of(first - 1, model=model)) != kind


@given(st.sampled_from(sorted(PALDIA_MODELS)), st.integers(1, 1000))
@settings(max_examples=40)
def test_more_requests_never_mean_cheaper_hardware(model: str, rate: int) -> None:
    lower, higher = (kind_of(Paldia(), view_of(each, model=model)) for each in (rate, rate + 1))
    assert KINDS[lower].usd_per_h <= KINDS[higher].usd_per_h


def test_the_baselines_look_at_one_batch_only_or_at_no_price() -> None:
    assert kind_of(Paldia(choice="isolated"), view_of(20)) == "c6i.4xlarge"
    assert kind_of(Paldia(choice="isolated"), view_of(21)) == M60
    assert kind_of(Paldia(choice="isolated"), view_of(10_000)) == M60  # a batch alone takes 75 ms
    assert kind_of(Paldia(choice="fastest"), view_of(1)) == V100


# Replicas


@given(st.integers(65, 500), st.sampled_from([M60, K80, V100]))
@settings(max_examples=40)
def test_as_many_replicas_as_batches_run_together(rate: int, kind: str) -> None:
    view = view_of(rate, kinds=[kind])
    profile = paldia_profiles("ResNet50")[kind]
    assert profile.sharing is not None
    latencies_ms = (0.0, *(profile.latency_ms.latency_ms(batch, 1) for batch in range(1, 65)))
    most = {M60: 6, K80: 9, V100: 12}[kind]
    model = DeviceModel(latencies_ms, profile.sharing.law, profile.sharing.demand(64), most)
    split = solver.best_split(model, rate)
    assert planned(Paldia(), view) == (kind, ceil((rate - split.queued) / 64), 64)
    assert planned(Paldia(sharing="together"), view) == (kind, min(ceil(rate / 64), most), 64)
    assert planned(Paldia(sharing="queue"), view) == (kind, 1, 64)


def test_replicas_on_a_gpu_reserve_no_share_and_on_a_cpu_take_the_node() -> None:
    [gpu], [cpu] = (next_plan(Paldia(), 0, view_of(rate)).stages[0].groups for rate in (100, 1))
    assert (gpu.spec.slot.share, gpu.spec.slot.accelerator) == (0.0, "M60")
    assert gpu.spec.slot.cores <= KINDS[M60].cores / 6
    assert cpu.spec.slot == Slot(4.0, "m4.xlarge")


def test_a_cpu_gets_batches_of_powers_of_two_within_the_slo() -> None:
    assert planned(Paldia(hardware=("c6i.4xlarge",)), view_of(500)) == ("c6i.4xlarge", 1, 32)
    assert planned(Paldia(hardware=("c6i.4xlarge",), batch_max=3), view_of(500))[2] == 3


def test_the_plan_says_why_and_whether_all_are_in_time() -> None:
    plan = next_plan(Paldia(hardware=(M60,)), 0, view_of(160))
    assert plan is not None
    assert plan.feasible
    assert plan.why.startswith("paldia: 160 requests end within ")
    assert plan.why.endswith(" queued")
    late = next_plan(Paldia(hardware=(M60,)), 0, view_of(500))
    assert late is not None
    assert not late.feasible


def test_replicas_end_after_the_keep_alive() -> None:
    policy = Paldia(hardware=(M60,), sharing="together")
    high, low = view_of(300, ready=M60), view_of(10, ready=M60)
    assert planned(policy, high, 0)[1] == 5
    assert planned(policy, low, 1)[1] == 5
    assert planned(policy, low, 600)[1] == 5
    assert planned(policy, low, 601)[1] == 1


def test_what_waits_is_expected_as_well() -> None:
    assert kind_of(Paldia(), view_of(10, waiting=0)) == "c6i.2xlarge"
    assert kind_of(Paldia(), view_of(10, waiting=11)) == M60
    assert kind_of(Paldia(backlog=False), view_of(10, waiting=11)) == "c6i.2xlarge"


def test_a_shorter_group_expects_fewer_requests() -> None:
    assert kind_of(Paldia(), view_of(40)) == M60
    assert kind_of(Paldia(group_ns=s(0.1)), view_of(40)) == "m4.xlarge"


def test_before_any_request_the_cheapest_or_what_the_initial_rate_needs() -> None:
    view = view_of(0)
    empty = replace(view, ingress=replace(view.ingress, buckets=()))
    assert kind_of(Paldia(), empty) == "m4.xlarge"
    assert kind_of(Paldia(initial_rps=100), empty) == M60


# Hysteresis


def hardware_over_time(policy: Paldia, rates: Sequence[float]) -> list[str]:
    """The planned kind at each second, where a switch is over within a second."""
    found: list[str] = []
    for second, rate in enumerate(rates):
        found.append(planned(policy, view_of(rate, ready=found[-1] if found else ""), second)[0])
    return found


def test_hardware_changes_with_the_fourth_mismatch_in_a_row() -> None:
    low, high = "m4.xlarge", M60
    assert hardware_over_time(Paldia(), [1, 50, 50, 50, 50]) == [low, low, low, low, high]
    assert hardware_over_time(Paldia(), [1, 50, 50, 1, 50, 50, 1]) == [low] * 7
    assert hardware_over_time(Paldia(), [50, 1, 1, 1, 1]) == [high, high, high, high, low]
    assert hardware_over_time(Paldia(wait_limit=2), [1, 50, 50, 50]) == [low, low, low, high]
    assert hardware_over_time(Paldia(), [1, 50, 200, 50, 200])[-1] == K80


def test_a_switch_ends_before_the_next_begins() -> None:
    policy = Paldia(wait_limit=0)
    assert kind_of(policy, view_of(50)) == M60
    for _ in range(5):  # the node is not there yet
        assert kind_of(policy, view_of(1)) == M60
    assert kind_of(policy, view_of(1, ready=M60)) == "m4.xlarge"


# Failures


def test_the_cheapest_more_performant_kind_takes_over_at_once() -> None:
    policy = Paldia()
    assert kind_of(policy, view_of(50, ready="")) == M60
    assert kind_of(policy, view_of(50, lost=[M60])) == K80
    assert kind_of(policy, view_of(50, lost=[M60, K80])) == V100
    assert kind_of(policy, view_of(50, lost=[V100])) == K80  # the next best GPU


def test_a_switch_to_what_is_lost_is_called_off() -> None:
    policy = Paldia(wait_limit=0)
    assert kind_of(policy, view_of(50)) == M60
    assert kind_of(policy, view_of(200, ready=M60)) == K80
    assert kind_of(policy, view_of(50, ready=M60, lost=[K80])) == M60


def test_no_plan_while_every_node_is_lost() -> None:
    assert next_plan(Paldia(), 0, view_of(50, lost=EC2)) is None


@pytest.mark.parametrize("workers", range(1, 9))
def test_as_many_replicas_as_fit_into_the_memory_of_a_gpu_fit_on_the_cores_of_its_node(workers: int) -> None:
    """A third of a core, three times, is not more than a core."""
    view = with_gpu_gib(2 * workers)
    group = only_group(Paldia(sharing="together"), view)
    ledger = Ledger.all_ready([node.node for node in view.nodes])
    belief = view.stages[0].beliefs["v", M60]
    placed = [ledger.place(ReplicaId(number), group.spec, belief) for number in range(workers)]
    assert all(placed), group.spec.slot


# Bad input


def test_kinds_without_a_price_cannot_be_compared() -> None:
    view = view_of(50, kinds=["m4.xlarge", M60])
    [cpu, gpu] = view.nodes
    view = replace(view, nodes=(replace(cpu, node=structs.replace(cpu.node, usd_per_h=0.0)), gpu))
    with pytest.raises(InputError, match=r"m4\.xlarge has no price") as error:
        next_plan(Paldia(), 0, view)
    assert "usd_per_h" in error.value.help
    assert kind_of(Paldia(choice="fastest"), view) == M60
    assert kind_of(Paldia(hardware=("m4.xlarge",)), view) == "m4.xlarge"


def test_a_model_that_fits_no_accelerator() -> None:
    view = view_of(50, kinds=[M60, K80])
    [stage] = view.stages
    large = {key: make_belief(huge(key[1]), *key) for key in stage.beliefs}
    view = replace(view, stages=(replace(stage, beliefs=large),))
    with pytest.raises(InputError, match=r"no node of kind g3s\.xlarge or p2\.xlarge has enough memory"):
        next_plan(Paldia(), 0, view)


def huge(kind: str) -> Profile:
    return structs.replace(paldia_profiles("ResNet50")[kind], device_memory_bytes=1 << 40)


def with_gpu_gib(*sizes: float, node_bytes: int = 32 << 30) -> ClusterView:
    """Nodes of one kind whose GPUs have so much memory; a replica needs 2 GiB of it, and 2 GiB of its node."""
    view = view_of(500, kinds=[M60])
    [node], [stage] = view.nodes, view.stages
    own = structs.replace(paldia_profiles("ResNet50")[M60], device_memory_bytes=2 << 30, memory_bytes=2 << 30)
    nodes = []
    for number, gib in enumerate(sizes):
        device = structs.replace(node.node.devices[0], memory_bytes=round(gib * (1 << 30)))
        changed = structs.replace(node.node, name=f"n{number}", devices=(device,), memory_bytes=node_bytes)
        views = (DeviceView(device, 1.0, device.memory_bytes, device.clients_max),)
        nodes.append(NodeView(changed, changed.cores, node_bytes, views, NodeState.READY))
    stages = (replace(stage, beliefs={("v", M60): make_belief(own, "v", M60)}),)
    return replace(view, stages=stages, nodes=tuple(nodes))


def test_nodes_of_one_kind_may_differ_and_the_one_with_most_room_is_used() -> None:
    for sizes, best in (((1, 8), "n1"), ((3, 8, 5), "n1"), ((8, 3), "n0")):
        group = only_group(Paldia(sharing="together"), with_gpu_gib(*sizes))
        assert (group.spec.node, group.count) == (best, 4), "replicas on another device would not share this one"
    equal = only_group(Paldia(sharing="together"), with_gpu_gib(8, 8))
    assert (equal.spec.node, equal.count) == (None, 4)


def test_replicas_on_a_gpu_fit_into_the_memory_of_its_node() -> None:
    assert only_group(Paldia(sharing="together"), with_gpu_gib(8, node_bytes=5 << 30)).count == 2
    with pytest.raises(InputError, match="has enough memory"):
        next_plan(Paldia(), 0, with_gpu_gib(8, node_bytes=1 << 30))


def test_what_the_cluster_or_the_application_does_not_have() -> None:
    with pytest.raises(InputError, match="no node has hardware 'p3'"):
        next_plan(Paldia(hardware=("p3",)), 0, view_of(1))
    with pytest.raises(InputError, match="no variant 'w'"):
        next_plan(Paldia(variant="w"), 0, view_of(1))
    one = make_stage(belief=make_belief(YOLOV5S_S))
    with pytest.raises(InputError, match="2 stages"):
        next_plan(Paldia(), 0, make_view(one, replace(one, name="second")))


@pytest.mark.parametrize(
    ("key", "value"),
    [("headroom_cpu", 0), ("headroom_gpu", 1.1), ("wait_limit", -1), ("group_s", 0)],
)
def test_a_parameter_out_of_range(key: str, value: Any) -> None:
    with pytest.raises((InputError, OutOfRange), match=key):
        build("scale", "paldia", {key: value})


# On the cores of a node


def on_cores(rate_rps: float, *, cores: float = 4.0, memory_bytes: int = 1) -> ClusterView:
    """One node with four cores; a batch of 8 takes 16 ms on all of them. Each takes 1.25 times as long beside another
    one, and ten times as long beside two."""
    kind = "m4.xlarge"
    sharing = DeviceSharing(law=CountLaw((1.0, 1.25, 10.0)), full_batch=8, cores=cores)
    profile = Profile(
        latency_ms=Amdahl(8, 0, 0, 0), max_batch=8, max_cores=4, memory_bytes=memory_bytes, sharing=sharing
    )
    stage = make_stage(Bucket(0, arrivals=round(rate_rps)), beliefs=[make_belief(profile, "v", kind)], slo_ms=200)
    return make_view(stage, nodes=[node_of(kind, ())], rates={"stage": rate_rps})


def part_of_memory(replicas: int) -> int:
    """The memory of a replica of which a node holds so many."""
    return KINDS["m4.xlarge"].memory_bytes // replicas


def only_group(policy: Paldia, view: ClusterView) -> Group:
    plan: Plan | None = next_plan(policy, 0, view)
    assert plan is not None
    [target] = plan.stages
    [group] = target.groups
    return group


def test_replicas_that_share_the_cores_of_a_node_reserve_a_part_and_may_use_all() -> None:
    group = only_group(Paldia(), on_cores(48))
    assert group.count == 2, "of six batches two run together and the others queue"
    assert group.spec.slot == Slot(0.666, "m4.xlarge", is_capped=False)
    assert 6 * group.spec.slot.cores <= KINDS["m4.xlarge"].cores
    assert only_group(Paldia(sharing="together"), on_cores(48)).count == 6
    assert only_group(Paldia(sharing="together"), on_cores(48, memory_bytes=part_of_memory(3))).spec.slot.cores == 1.333


def test_a_replica_that_shares_with_nobody_has_all_cores_as_a_cap() -> None:
    whole = Slot(4.0, "m4.xlarge")
    assert only_group(Paldia(sharing="queue"), on_cores(48)).spec.slot == whole
    large = KINDS["m4.xlarge"].memory_bytes // 2 + 1
    assert only_group(Paldia(), on_cores(48, memory_bytes=large)).spec.slot == whole, "two do not fit"
    assert only_group(Paldia(), on_cores(48, cores=2.0)).spec.slot == whole, "measured on other nodes"


@given(st.integers(1, 400), st.integers(1, 6))
@settings(max_examples=40)
def test_cores_are_never_overbooked(rate: int, most: int) -> None:
    group = only_group(Paldia(), on_cores(rate, memory_bytes=part_of_memory(most)))
    assert group.count <= most
    assert most * group.spec.slot.cores <= 4.0
