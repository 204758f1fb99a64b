"""A scenario: a deployment, its requests, and the true behaviour of the simulated world.

Plain values. The simulator acts on `Truth`; no policy sees it (law 2).

Sources of the defaults: Sponge specification §1.4 and §7.3-6 (P99 over mean 1.05, variation 3 %, resize 50 ms), §3.1
(payload 284 KiB).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from sloop.app.application import Application, Deployment, SystemChoice
from sloop.options import Fraction, OutOfRange, Range, Value
from sloop.profile.interference import Slowdown
from sloop.profile.profile import SizeLatency
from sloop.units import s
from sloop.vocabulary import Canary
from sloop.workload import Trace

ResizeRule = Literal["next_batch", "rescale"]
"""A resize during a batch takes effect at the next batch, or shortens (lengthens) the rest of the running one."""

Delivery = Literal["delay", "attach"]
"""A slow upload delays the arrival, or the request arrives at once with a budget shorter by the upload."""

StoreLink = Literal["shared", "per_node"]
"""All nodes share one link from the store, or each has its own of that capacity."""

NoiseShape = Literal["normal", "exponential", "deterministic"]
"""The distribution of service times. `exponential` and `deterministic` are for comparison with queueing theory."""


@dataclass(frozen=True, slots=True)
class ServiceTruth:
    """The true durations of batches: mean = profile / `ratio` (P99 over mean), with coefficient of variation `cv`.

    The defaults are the profile's measured values, or 1.05 and 0.03 if it was not measured or only one of the two is
    given. Only the normal `shape` uses `cv`.
    """

    ratio: Annotated[float, Range(above=0, most=100)] | None = None
    cv: Annotated[float, Range(least=0, most=10)] | None = None
    spread: Annotated[float, Range(least=0, most=10)] | None = None
    """Runs may be slower or faster by this fraction, which gives results a range; 0 for no range. The default is the
    difference between the passes of a measured profile."""
    shape: NoiseShape = "normal"


@dataclass(frozen=True, slots=True)
class ColdStartTruth:
    """The true start-up time of a replica: `start_s`, uniform within ± `jitter` (a fraction of it).

    The default is `load_s` of the variant's profile, or 10 s if it has none. With `warm`, the replicas of the first
    plan are ready at time 0. Fetching weights (`NetworkTruth.topology`) takes its own time before that. A replica whose
    weights its node has when it is ordered takes `local_s` instead, where that is declared: they are in the page cache,
    or in the memory of a process from which replicas get them.

    On each node, `spare_workers` wait without a model. A replica takes one if it is there, and then starts without the
    part of its start that is the process (`process_s` of the profile's `startup`, if that is known), as on a server. A
    shadow takes one, or waits until one is there, and loads its blocks, which takes as long as the layers in the
    profile say. A spare worker that was taken is replaced within `spare_s` seconds (AsyFunc's specification, sections
    2.3 and 2.8); without any, each replica and each shadow starts a process of its own.
    """

    start_s: Annotated[float, Range(least=0, most=1e6)] | None = None
    local_s: Annotated[float, Range(least=0, most=1e6)] | None = None
    jitter: Annotated[float, Range(least=0, most=1)] = 0.0
    warm: bool = True
    spare_workers: Annotated[int, Range(least=0, most=10_000)] = 1
    spare_s: Annotated[float, Range(least=0, most=1e6)] = 1.0


@dataclass(frozen=True, slots=True)
class TopologyTruth:
    """The network between the nodes and the store of models. Capacities are in Mbit/s of payload and for each direction
    of a link; without one, the link has no limit."""

    store_mbps: Annotated[float, Range(above=0, most=1e9)]
    """From the store to the cluster."""
    store: StoreLink = "shared"
    node_mbps: Annotated[float, Range(above=0, most=1e9)] | None = None
    """Between a node and its leaf switch."""
    nodes_per_leaf: Annotated[int, Range(least=1, most=1_000_000)] | None = None
    """The nodes are divided among leaf switches in the order of `cluster`; by default all are at one."""
    leaf_mbps: Annotated[float, Range(above=0, most=1e9)] | None = None
    """Between a leaf switch and the spine, which has no limit."""

    def __post_init__(self) -> None:
        """OutOfRange for a limit of leaf switches that are not declared."""
        if self.leaf_mbps is not None and self.nodes_per_leaf is None:
            raise OutOfRange("leaf_mbps", "has no effect without `nodes_per_leaf`", "say how many nodes a leaf has")


@dataclass(frozen=True, slots=True)
class NetworkTruth:
    """The network between clients and server, which is a link with a bandwidth over time, and its payloads; and the
    network of the cluster."""

    link: str | Mapping[str, object] | None = None
    """A file of bandwidths, or the options of a generated link (`sloop.workload.link`). Without it, requests arrive
    when they are sent."""
    payload_kb: tuple[Annotated[float, Range(least=0, most=1e9)], ...] = (284.0,)
    """Payload sizes; each request draws one of them, all equally likely."""
    semantics: Delivery = "delay"
    topology: TopologyTruth | None = None
    """With it, the weights of a model come to a node over its links before a replica can load them; without it, a cold
    start is `ColdStartTruth` alone."""

    def __post_init__(self) -> None:
        """OutOfRange without a payload size; ValueError if no network is declared."""
        if not self.payload_kb:
            raise OutOfRange("payload_kb", "must be at least one payload size, not an empty list")
        if self.link is None and self.topology is None:
            raise ValueError("neither `link` (of the clients) nor `topology` (of the cluster) is given")


@dataclass(frozen=True, slots=True)
class FailureTruth:
    """What fails at random: replicas, with a mean time of `mtbf_s` seconds between the failures of each; and requests.

    A request that is bad at a stage makes the model raise in every batch with it, a deadly one kills every replica that
    runs it. Both are fractions of the visits to each stage, 0 to 1.
    """

    mtbf_s: Annotated[float, Range(above=0, most=1e12)] | None = None
    bad_requests: Annotated[float, Range(least=0, most=1)] = 0.0
    deadly_requests: Annotated[float, Range(least=0, most=1)] = 0.0

    def __post_init__(self) -> None:
        """ValueError if nothing fails."""
        if not (self.mtbf_s or self.bad_requests or self.deadly_requests):
            raise ValueError("nothing fails: give mtbf_s, bad_requests or deadly_requests")


@dataclass(frozen=True, slots=True)
class NodeTruth:
    """The true life of nodes. A node on demand is ready `acquire_s` after its order (uniform within ± `jitter`, a
    fraction of it); a node that fails loses its replicas and is ready again after `repair_s`."""

    acquire_s: Annotated[float, Range(least=0, most=1e6)] | None = None
    """The default is that of the node's kind: 60 s, which is assumed."""
    jitter: Annotated[float, Range(least=0, most=1)] = 0.0
    mtbf_s: Annotated[float, Range(above=0, most=1e12)] | None = None
    """Mean time between failures of each node; without it no node fails."""
    repair_s: Annotated[float, Range(above=0, most=1e9)] = 300.0
    outage_at_s: Annotated[float, Range(above=0, most=1e9)] | None = None
    """At this time, and then every 2 × `outage_s`, the node with the most replicas goes down for `outage_s`; nobody can
    acquire it meanwhile."""
    outage_s: Annotated[float, Range(above=0, most=1e9)] = 60.0


@dataclass(frozen=True, slots=True)
class BackgroundTruth:
    """Other work on the cores of all nodes, for `part` of the time, in phases of `phase_s` on average.

    Meanwhile batches on cores take `cores` times as long, those on accelerators, which need cores before and after,
    `accelerators` times.
    """

    part: Fraction
    phase_s: Annotated[float, Range(above=0, most=1e6)] = 3.0
    cores: Annotated[float, Range(least=1, most=100)] = 2.0
    accelerators: Annotated[float, Range(least=1, most=100)] = 1.035


@dataclass(frozen=True, slots=True)
class InterferenceTruth:
    """How much slower batches truly are for what runs beside them on the same device; by default as in the profiles.

    The true slowdown is S = 1 + `error` · (S of the law - 1): above 1, the profiles are optimistic about neighbours. In
    a world with 0, `interference: none`, batches do not disturb each other.
    """

    law: Slowdown | None = None
    """Instead of the laws of the profiles, also for variants whose profile has none."""
    bandwidth: Annotated[float, Range(least=0, most=1)] | None = None
    """Instead of what the profiles say: the part of the device's memory bandwidth that a full batch uses."""
    error: Annotated[float, Range(least=0, most=100)] = 1.0


@dataclass(frozen=True, slots=True)
class ProcessesTruth:
    """What runs beside the replicas on the cores of the server's node, which is the first of the cluster.

    Edge and deciding process take `request_us` of a core for a request, and whoever sends it, if that is on the same
    machine, `client_us`. A load generator does; clients elsewhere take nothing.
    """

    request_us: Annotated[float, Range(least=0, most=1e6)] = 700.0
    client_us: Annotated[float, Range(least=0, most=1e6)] = 0.0


@dataclass(frozen=True, slots=True)
class Truth:
    """The true behaviour of the simulated world, which no policy knows."""

    service: ServiceTruth = ServiceTruth()
    profile_error: Annotated[float, Range(above=0, most=100)] = 1.0
    """True durations = profile's durations × this: above 1 the profile is optimistic."""
    quota_ms: Annotated[float, Range(least=0, most=1e4)] | None = None
    """The period of CPU quotas: a replica with a fraction of a core that was idle ends its next batch earlier, by up to
    one period. The default is that of a server (10 ms) for profiles that were measured, whose durations are those of a
    busy replica; others have no such effect. 0 for none."""
    resize_ms: Annotated[float, Range(least=0, most=1e7)] = 50.0
    resize: ResizeRule = "next_batch"
    cold_start: ColdStartTruth = ColdStartTruth()
    network: NetworkTruth | None = None
    failures: FailureTruth | None = None
    nodes: NodeTruth = NodeTruth()
    background: BackgroundTruth | None = None
    interference: InterferenceTruth = InterferenceTruth()
    processes: ProcessesTruth | None = None
    """None: replicas have the cores of their nodes for themselves, as in publications."""
    plan_ms: Annotated[float, Range(least=0, most=1e6)] = 5.0
    """How long a plan is computed that is not computed within the event loop; the old plan is in force until then."""
    fan_out: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """For stages with `each`: the number of parts of a request, or several, all equally likely."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """For stages with `when`: the fraction of the requests at the branch that take it, 0 to 1."""
    sizes: Mapping[str, tuple[SizeLatency, ...]] = field(default_factory=dict)
    """By stage, the latencies of rows of several sizes, ascending, instead of those of the profiles."""


@dataclass(frozen=True, slots=True)
class Change:
    """Somebody changes the deployment during the run: exactly one of `deploy`, `promote`, `remove` and `system`."""

    at_s: float
    deploy: Application | None = None
    """A new application, or a new version of one with its name. Its stage names are not yet qualified."""
    canary: Canary | None = None
    """For `deploy`; None: the new version gets all requests as soon as it is ready."""
    profile_error: float = 1.0
    """For `deploy`: its true durations = profile's durations × this × `Truth.profile_error`."""
    promote: str = ""
    """Name of an application."""
    remove: str = ""
    """Name of an application."""
    version: str = ""
    """For `promote` and `remove`; empty: the newest version, or all versions."""
    system: SystemChoice | None = None
    """Another system decides from then on for all versions of `application`."""
    application: str = ""

    @property
    def at_ns(self) -> int:
        """When it happens, in ns from the start of the run."""
        return s(self.at_s)


@dataclass(frozen=True, slots=True)
class Scenario:
    """One experiment: all `systems` serve the same requests under the same truth."""

    deployment: Deployment
    traces: Mapping[str, Mapping[str, object] | Trace]
    """By name of an application, also of one that is only deployed by a change: a trace, or the options of
    `sloop.workload.trace_from`; `file`, if present, is an absolute path."""
    duration_s: float
    seed: int
    truth: Truth
    systems: tuple[SystemChoice, ...]
    changes: tuple[Change, ...] = ()
    """In order of time."""

    @property
    def application(self) -> Application:
        """The only application. ValueError if there are several."""
        return self.deployment.application

    @property
    def duration_ns(self) -> int:
        """The length of the run in ns."""
        return s(self.duration_s)

    def declared_trace(self, name: str) -> Value:
        """The trace of an application as declared, so that errors name its line."""
        path, deployment = f"traces.{name}", self.deployment
        if len(deployment.applications) == 1 and path not in deployment.lines:
            path = "trace"
        return deployment.declared(path, self.traces[name])
