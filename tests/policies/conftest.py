"""Arguments of policies, written as short literals: visits, idle replicas, nodes, stages, clusters."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
from msgspec import Struct

from sloop.core.views import Belief, Bucket, ClusterView, NodeView, ReplicaView, StageView, Traffic
from sloop.profile.estimate import Estimate
from sloop.profile.profile import Profile
from sloop.profile.published import YOLOV5S_S
from sloop.units import ms, s
from sloop.vocabulary import Life, Node, Path, Plan, ReplicaId, ReplicaSpec, Request, RequestId, Visit


class Idle(Struct, frozen=True):
    """An idle replica as a router sees it."""

    id: ReplicaId
    cores: float = 1.0
    batches: int = 0


def make_visit(number: int = 0, *, deadline_ms: float = 1000, arrived_ms: float = 0, sent_ms: float = 0) -> Visit:
    request = Request(RequestId(number), ms(sent_ms), ms(arrived_ms), ms(deadline_ms))
    return Visit(request, "stage", request.arrived_ns, request.deadline_ns)


def make_idle(*ids: int, cores: float = 1.0) -> list[Idle]:
    return [Idle(ReplicaId(number), cores) for number in ids]


def make_node(
    name: str = "a",
    *,
    free_cores: float = 4.0,
    cores: float = 8.0,
    memory_bytes: int = 1 << 30,
    share: Mapping[str, float] | None = None,
) -> NodeView:
    share = share or {}
    node = Node(name, "local", cores, memory_bytes, tuple(share))
    return NodeView(node, free_cores, memory_bytes, share)


def make_arrivals(*counts: int, bucket_ns: int = s(1)) -> StageView:
    """A stage that has seen `counts` arrivals in its last buckets, oldest first, and nothing else."""
    buckets = [Bucket(index * bucket_ns, arrivals=count) for index, count in enumerate(counts)]
    return replace(make_stage(*buckets), bucket_ns=bucket_ns)


def make_belief(profile: Profile = YOLOV5S_S) -> Belief:
    return Estimate(profile, correct=False)


def make_stage(
    *buckets: Bucket,
    belief: Belief | None = None,
    name: str = "stage",
    queue: Sequence[Visit] = (),
    replicas: Sequence[ReplicaView] = (),
    slo_ms: float = 1000,
    variants: Mapping[str, Belief] | None = None,
) -> StageView:
    """A stage with one variant, `v`, by default, that has seen `buckets` of a second each, oldest first."""
    return StageView(
        name=name,
        slo_ns=ms(slo_ms),
        after=(),
        variants={"v": belief or make_belief()} if variants is None else variants,
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
    node = NodeView(Node("n", "local", cores, 1 << 30), cores, 1 << 30, {})
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
    return ReplicaView(ReplicaId(number), ReplicaSpec("stage", "v", cores, "n"), life, since_ns, 0)


@pytest.fixture(name="visit")
def visit_fixture() -> Callable[..., Visit]:
    return make_visit


@pytest.fixture(name="idle")
def idle_fixture() -> Callable[..., list[Idle]]:
    return make_idle


@pytest.fixture(name="node")
def node_fixture() -> Callable[..., NodeView]:
    return make_node


@pytest.fixture(name="arrivals")
def arrivals_fixture() -> Callable[..., StageView]:
    return make_arrivals


@pytest.fixture(name="stage")
def stage_fixture() -> Callable[..., StageView]:
    return make_stage


@pytest.fixture(name="view")
def view_fixture() -> Callable[..., ClusterView]:
    return make_view


@pytest.fixture(name="replica")
def replica_fixture() -> Callable[..., ReplicaView]:
    return make_replica


@pytest.fixture(name="belief")
def belief_fixture() -> Callable[..., Belief]:
    return make_belief
