"""The report of `sloop plan`: plans, predictions, costs and reasons, as values. Its fields are the keys of the JSON."""

from msgspec import Struct

from sloop.systems.planning.marginal import NOTHING, BindingConstraint, MarginalCost
from sloop.systems.planning.placement import PlanShortfall
from sloop.systems.planning.timing import Arrivals


class StageReport(Struct, frozen=True):
    """One group of equal replicas of one stage. Latencies are in ms and infinite (null in JSON) where it cannot keep
    up."""

    stage: str
    variant: str
    replicas: int
    batch: int
    """The largest batch that the plan allows."""
    cores: float
    """Cores of each replica."""
    predicted_ms: float
    """Time from entering the stage to leaving it: `wait_ms` + `service_ms`."""
    rate_rps: float = 0.0
    """Requests per second that reach the stage, parts and rows counted one by one: the rate times the visits per
    request, times `rows`."""
    parts: float = 1.0
    """Visits of one request that arrive together: more than one after a fan-out."""
    service_ms: float = 0.0
    """Duration of one batch of `batch_expected`."""
    wait_ms: float = 0.0
    """Wait for the batch to fill, for the previous batch, and for earlier visits that arrived at the same instant."""
    batch_expected: int = 1
    """The batch size that the prediction assumes."""
    rate_max_rps: float = 0.0
    """The most that all replicas of the stage serve together."""
    binds: tuple[BindingConstraint, ...] = ()
    """The binding constraints of the stage, or why there is none (`spare`, `minimum`); empty without replicas."""
    one_more: str = NOTHING
    """What the stage needs for one more request per second at the ingress."""
    application: str = ""
    hardware: str = ""
    accelerator: str = ""
    share: float = 0.0
    """Fraction of an accelerator that each replica may use; 0 without one."""
    group_rps: float = 0.0
    """The part of `rate_rps` that these replicas serve."""
    is_capped: bool = True
    """Whether each can use no more than its cores, or its share; otherwise these are only reserved."""
    rows: float = 1.0
    """The mean rows of a request; batches, rates and what the replicas serve are in rows."""


class PathReport(Struct, frozen=True):
    """One path through the graph; `slack_ms` is the deadline less the prediction, negative where it is missed."""

    stages: tuple[str, ...]
    share: float
    slo_ms: float
    predicted_ms: float
    slack_ms: float
    application: str = ""


class PlacementReport(Struct, frozen=True):
    """The replicas of one group on one node, and on one accelerator of it ("" for none)."""

    application: str
    stage: str
    variant: str
    node: str
    hardware: str
    device: str
    share: float
    """Fraction of the accelerator that each replica may use; 0 without one."""
    replicas: int
    cores: float
    """Cores of each replica."""
    batch: int
    """The largest batch that the plan allows."""
    rate_rps: float
    """Requests per second that these replicas serve together."""
    is_capped: bool = True
    """Whether they can use no more than their cores, or their share; otherwise these are only reserved."""


class KindReport(Struct, frozen=True):
    """The nodes of one kind of hardware that hold a replica."""

    hardware: str
    nodes: int
    held: int
    """How many of them are always there."""
    rented: int
    """How many of them are on demand."""
    usd_per_h: float


class CoreLimit(Struct, frozen=True):
    """How many cores of a kind of hardware the other applications leave to one that wants more."""

    hardware: str
    needs: float
    """The cores that it would have without the others: at most all of the cluster."""
    has: float
    others: tuple[tuple[str, float], ...]
    """The other applications with their cores, the largest first."""
    why: str
    """The limit as text."""


class PlanVerdict(Struct, frozen=True, kw_only=True):
    """What a plan costs and how it performs: of one application, or of all."""

    rate_rps: float
    """Requests per second, of all applications together."""
    feasible: bool
    """Whether every stage keeps up, every path meets its deadline and every replica has room, for these `arrivals`."""
    cores: float
    predicted_ms: float
    """The time along the longest path."""
    why: str
    one_more: MarginalCost | None
    """What one more request per second needs; None for several applications, where each has its own."""
    plan_why: str
    """The reason that the system itself gives."""
    plan_feasible: bool
    """Whether the plan meets the criterion of the system itself."""
    plan_arrivals: Arrivals | None
    """The arrivals that the system itself plans for, if its scaling policy says so."""
    feasible_arrivals: tuple[Arrivals, ...]
    """Every assumption about arrivals under which the plan is feasible."""
    predicted_ms_low: float | None
    predicted_ms_high: float | None
    """`predicted_ms` if the machine is as fast, or as slow, as the passes of the profiles were apart
    (`sloop.profile.passes.speed_range`); None if no profile has several passes, or for several applications."""


class ApplicationReport(PlanVerdict, frozen=True, kw_only=True):
    """The plan of one application."""

    application: str
    slo_ms: float
    weight: float
    limits: tuple[CoreLimit, ...]
    """Where other applications leave it fewer cores than it wants."""


class PlanReport(PlanVerdict, frozen=True, kw_only=True):
    """The plans that a system keeps at steady rates, and their predicted latencies and costs."""

    system: str
    arrivals: Arrivals
    """The arrivals that the predictions assume."""
    stages: tuple[StageReport, ...]
    usd_per_h: float
    """Sum of the prices of the nodes that hold a replica; nodes without a price count as 0, see `unpriced`."""
    solve_ms: float
    """The longest single decision of the planner; 0 where no clock was given."""
    notes: tuple[str, ...]
    """Reservations about the prediction, a sentence each."""
    paths: tuple[PathReport, ...]
    """Of each application, the path with the least slack comes first."""
    shortfalls: tuple[PlanShortfall, ...]
    """Why the plan is not feasible; empty where it is."""
    unpriced: tuple[str, ...]
    """Hardware of the nodes that hold a replica and have no price."""
    applications: tuple[ApplicationReport, ...]
    placements: tuple[PlacementReport, ...]
    nodes: tuple[KindReport, ...]
    """The nodes that hold a replica, by kind of hardware."""
