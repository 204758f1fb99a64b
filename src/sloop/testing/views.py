"""Arguments of policies, written as short literals: visits, idle replicas, nodes, stages, clusters.

A policy that is tried with them gets what the core would show it, e.g. `Headroom().plan(0, make_view(make_stage()))`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from msgspec import Struct

from sloop.core.views import (
    Belief,
    BeliefKey,
    Bucket,
    ClusterView,
    DeviceView,
    NodeView,
    ReplicaView,
    StageView,
    Traffic,
)
from sloop.profile.estimate import Estimate
from sloop.profile.profile import Profile
from sloop.profile.published import YOLOV5S_S
from sloop.units import ms, s
from sloop.vocabulary import (
    Device,
    Life,
    Node,
    NodeState,
    Path,
    Plan,
    ReplicaId,
    ReplicaSpec,
    Request,
    RequestId,
    Slot,
    Visit,
)

__all__ = [
    "Idle",
    "by_kind",
    "make_arrivals",
    "make_belief",
    "make_idle",
    "make_node",
    "make_replica",
    "make_stage",
    "make_view",
    "make_visit",
    "named",
]


class Idle(Struct, frozen=True):
    """An idle replica as a router sees it."""

    id: ReplicaId
    cores: float = 1.0
    batches: int = 0
    weight: float = 1.0
    alone_ns: int = 1
    batch_max: int = 1


def make_visit(number: int = 0, *, deadline_ms: float = 1000, arrived_ms: float = 0, sent_ms: float = 0) -> Visit:
    request = Request(RequestId(number), ms(sent_ms), ms(arrived_ms), ms(deadline_ms))
    return Visit(request, "stage", request.arrived_ns, request.deadline_ns)


def make_idle(*ids: int, cores: float = 1.0) -> list[Idle]:
    return [Idle(ReplicaId(number), cores, weight=cores) for number in ids]


def make_node(  # noqa: PLR0913  # one argument for each thing a test may want to be different
    name: str = "a",
    *,
    free_cores: float = 4.0,
    cores: float = 8.0,
    memory_bytes: int = 1 << 30,
    hardware: str = "local",
    usd_per_h: float = 0.0,
    devices: Mapping[str, float] | None = None,
    on_demand: bool = False,
    state: NodeState = NodeState.READY,
) -> NodeView:
    """A node with accelerators of kind `T4`, given as name and free share of each."""
    views = tuple(
        DeviceView(Device(device, "T4", 16 << 30), share, 16 << 30, 48) for device, share in (devices or {}).items()
    )
    own = tuple(view.device for view in views)
    node = Node(name, hardware, cores, memory_bytes, own, usd_per_h, on_demand)
    return NodeView(node, free_cores, memory_bytes, views, state)


def make_arrivals(*counts: int, bucket_ns: int = s(1)) -> StageView:
    """A stage that has seen `counts` arrivals in its last buckets, oldest first, and nothing else."""
    buckets = [Bucket(index * bucket_ns, arrivals=count) for index, count in enumerate(counts)]
    return replace(make_stage(*buckets), bucket_ns=bucket_ns)


def make_belief(
    profile: Profile = YOLOV5S_S, variant: str = "v", hardware: str = "local", accuracy: float | None = None
) -> Estimate:
    return Estimate(profile, variant=variant, hardware=hardware, accuracy=accuracy, correct=False)


def named(variants: Mapping[str, Estimate], hardware: str = "local") -> tuple[Estimate, ...]:
    """The beliefs as those of variants with these names."""
    return tuple(make_belief(own.profile, name, hardware, own.accuracy) for name, own in variants.items())


def by_kind(*beliefs: Belief) -> dict[BeliefKey, Belief]:
    """Beliefs as a stage has them."""
    return {(belief.variant, belief.hardware): belief for belief in beliefs}


def make_stage(
    *buckets: Bucket,
    belief: Estimate | None = None,
    name: str = "stage",
    queue: Sequence[Visit] = (),
    replicas: Sequence[ReplicaView] = (),
    slo_ms: float = 1000,
    beliefs: Sequence[Belief] = (),
) -> StageView:
    """A stage with one variant, `v`, by default, that has seen `buckets` of a second each, oldest first."""
    return StageView(
        name=name,
        slo_ns=ms(slo_ms),
        after=(),
        beliefs=by_kind(*(beliefs or named({"v": belief or make_belief()}))),
        replicas=tuple(replicas),
        queue=tuple(queue),
        running=0,
        buckets=buckets,
        bucket_ns=s(1),
    )


def make_view(
    *stages: StageView,
    cores: float = 64,
    nodes: Sequence[NodeView] | None = None,
    plan: Plan | None = None,
    rates: Mapping[str, float] | None = None,
    paths: Sequence[Path] = (),
) -> ClusterView:
    """The cluster: by default one node, each stage's arrivals of the last second as demand, one path through them."""
    node = make_node("n", cores=cores, free_cores=cores)
    demand = {stage.name: stage.rate_rps() for stage in stages} | dict(rates or {})
    ingress = Traffic(buckets=stages[0].buckets, bucket_ns=stages[0].bucket_ns)
    chain = Path(tuple(stage.name for stage in stages), stages[0].slo_ns)
    return ClusterView(
        stages=stages,
        nodes=(node,) if nodes is None else tuple(nodes),
        plan=plan,
        demand_rps=demand,
        ingress=ingress,
        forecast_rps=demand[stages[0].name],
        paths=tuple(paths) or (chain,),
    )


def make_replica(number: int, life: Life = Life.READY, *, cores: float = 1.0, since_ns: int = 0) -> ReplicaView:
    return ReplicaView(ReplicaId(number), ReplicaSpec("stage", "v", Slot(cores, "local")), life, since_ns, 0, "n")
