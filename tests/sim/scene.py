"""Small worlds for the simulator's tests, made from what a user would write, and cores that are broken on purpose."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs

from sloop.actions import Action
from sloop.app.load import load_scenario
from sloop.core.protocols import CoreInterface, PlanSource
from sloop.core.views import PlanInput
from sloop.events import Event
from sloop.profile.profile import LatencyTable, LayerBlock, LayerProfile
from sloop.runlog import MemoryLog, Record
from sloop.sim import World, simulate

WORK_CONSERVING: dict[str, Any] = {"name": "static", "order": "fifo", "drop": "never", "batch": "work_conserving"}


def world(  # one argument for each thing a test may want to be different
    *,
    seed: int = 1,
    latency_ms: dict[str, Any] | None = None,
    system: dict[str, Any] | None = None,
    trace: dict[str, Any] | None = None,
    truth: dict[str, Any] | None = None,
    slo_ms: float = 200.0,
    duration_s: float = 5.0,
    cores: float = 16.0,
    max_batch: int = 8,
    slos_ns: tuple[int, ...] = (),
    stage: dict[str, Any] | None = None,
    **changes: Any,
) -> World:
    """One stage of one variant whose batch of n takes 10 + 2n ms, one replica, 40 requests per second. `stage` has
    other keys of the stage, among them its profile."""
    profile = {
        "latency_ms": latency_ms or {"form": "quadratic", "alpha": 0.0, "beta": 2.0, "gamma": 10.0},
        "max_batch": max_batch,
        "max_cores": 16,
    }
    scenario = load_scenario(
        {
            "name": "scene",
            "slo_ms": slo_ms,
            "stages": [{"name": "only", **(stage or {"variants": [{"name": "a", "profile": profile}]})}],
            "system": system or {"name": "static"},
            "cluster": {"nodes": [{"hardware": "custom", "count": 1, "cores": cores, "memory_bytes": 10**9}]},
            "trace": trace or {"kind": "poisson", "rate": 40},
            "duration_s": duration_s,
            "seed": seed,
            "truth": truth or {},
        }
    )
    return replace(with_clients(World.from_scenario(scenario), slos_ns=slos_ns), **changes)


def with_clients(made: World, **changes: Any) -> World:
    """The same world of a single application, with other fields of its `Clients`."""
    ((name, clients),) = made.clients.items()
    return replace(made, clients={name: replace(clients, **changes)})


def graph_world(
    stages: dict[str, dict[str, Any]],
    *,
    truth: dict[str, Any] | None = None,
    system: dict[str, Any] | None = None,
    paths: list[dict[str, Any]] | None = None,
    slo_ms: float = 500.0,
    rate: float = 40.0,
) -> World:
    """Five seconds of an application of stages as that of `world`, hanging together as told, two replicas each."""
    profile = {
        "latency_ms": {"form": "quadratic", "alpha": 0.0, "beta": 2.0, "gamma": 10.0},
        "max_batch": 8,
        "max_cores": 16,
    }
    scenario = load_scenario(
        {
            "name": "graph",
            "slo_ms": slo_ms,
            "stages": [{"name": name, "profile": profile, **edges} for name, edges in stages.items()],
            "system": system or {"name": "static", "replicas": 2, "cores": 1.0},
            "cluster": {"nodes": [{"hardware": "custom", "count": 1, "cores": 16, "memory_bytes": 10**9}]},
            "trace": {"kind": "poisson", "rate": rate},
            "duration_s": 5,
            "seed": 1,
            "truth": truth or {},
            **({"paths": paths} if paths else {}),
        }
    )
    return World.from_scenario(scenario)


def several(  # one argument for each thing a test may want to be different
    names: Sequence[str] = ("a", "b"),
    *,
    changes: Sequence[dict[str, Any]] = (),
    system: str | dict[str, Any] = "static",
    nodes: Sequence[dict[str, Any]] = ({"hardware": "custom", "count": 1, "cores": 16, "memory_bytes": 10**9},),
    truth: dict[str, Any] | None = None,
    rates: Mapping[str, float] | None = None,
    duration_s: float = 5.0,
    **options: Any,
) -> World:
    """A deployment of applications as that of `world`, each with 20 requests per second of its own."""
    rates = rates or dict.fromkeys((*names, *(each["deploy"]["name"] for each in changes if "deploy" in each)), 20.0)
    scenario = load_scenario(
        {
            "name": "several",
            "applications": [application(name, **options) for name in names],
            "system": system,
            "cluster": {"nodes": list(nodes)},
            "traces": {name: {"kind": "poisson", "rate": rate} for name, rate in rates.items()},
            "duration_s": duration_s,
            "seed": 1,
            "truth": truth or {},
            **({"changes": list(changes)} if changes else {}),
        }
    )
    return World.from_scenario(scenario)


def application(name: str, *, slo_ms: float = 200.0, **options: Any) -> dict[str, Any]:
    """An application of one stage whose batch of n takes 10 + 2n ms."""
    profile = {
        "latency_ms": {"form": "quadratic", "alpha": 0.0, "beta": 2.0, "gamma": 10.0},
        "max_batch": 8,
        "max_cores": 16,
        "load_s": 0.5,
    }
    return {"name": name, "slo_ms": slo_ms, "stages": [{"name": "only", "profile": profile}], **options}


def records_of(played: World, **options: Any) -> list[tuple[int, Record]]:
    """The log of one run."""
    log = MemoryLog()
    simulate(played, [log], **options)
    return log.records


Tamper = Callable[[Any], Sequence[Action]]
"""What becomes of an action."""


@dataclass
class Broken:
    """A core whose orders are tampered with on their way out."""

    core: CoreInterface
    tamper: Tamper

    @property
    def wake_ns(self) -> int:
        return self.core.wake_ns

    @property
    def planner(self) -> PlanSource:
        return self.core.planner

    @property
    def plan_input(self) -> PlanInput | None:
        return self.core.plan_input

    def handle(self, now_ns: int, event: Event, more_at_this_instant: bool = False) -> Sequence[Action]:
        actions = self.core.handle(now_ns, event, more_at_this_instant)
        return [out for action in actions for out in self.tamper(action)]


def once(kind: type, change: Tamper, *, after: int = 20) -> Tamper:
    """Tampers with one order of a kind, some way into the run."""
    seen = 0

    def tamper(action: Any) -> Sequence[Action]:
        nonlocal seen
        seen += isinstance(action, kind)
        return change(action) if isinstance(action, kind) and seen == after else [action]

    return tamper


T5 = {
    "latency_ms": {"table": {1: {1: 1406.0}}},
    "max_batch": 1,
    "weights_bytes": 11_408_000_000,
    "startup": {"weights_s": 14.138, "send_s": 1.206},
    "accelerator": "A10",
    "device_memory_bytes": 11_408_000_000,
}
"""T5-3B as in the Flashpoint specification, section 3.1, but ten times as slow, so that a small load needs many."""


def provisioned(**provision: Any) -> World:
    """A load that grows to five times as much for a while, on ten nodes of eight accelerators in two racks."""
    scenario = {
        "name": "t5",
        "slo_ms": 60_000,
        "stages": [{"name": "only", "variants": [{"name": "t5", "profile": T5}]}],
        "system": {"name": "hpa", "drop": "never", "provision": {"name": "cheapest_start", **provision}},
        "cluster": {
            "nodes": [
                {
                    "hardware": "custom",
                    "count": 10,
                    "cores": 32,
                    "memory_bytes": 200 * 2**30,
                    "per_rack": 5,
                    "devices": [{"kind": "A10", "memory_gib": 24}] * 8,
                }
            ]
        },
        "trace": {"kind": "square", "rate": 3, "burst_rate": 16, "period_s": 120, "burst_s": 40},
        "duration_s": 200,
        "truth": {
            "network": {
                "topology": {"store_mbps": 2203, "node_mbps": 7506.89, "nodes_per_leaf": 5, "leaf_mbps": 15_000}
            }
        },
    }
    return World.from_scenario(load_scenario(scenario))


def in_parts(**provision: Any) -> World:
    """The same load, of a T5 whose layers are known, six equal ones: its replicas may start in parts."""
    made = provisioned(partition=True, **provision)
    (application,) = made.deployment.applications
    (stage,) = application.stages
    (variant,) = stage.variants
    assert variant.profile is not None
    block = LayerBlock(
        end="",
        operators="MatMul",
        layers=4,
        param_bytes=11_408_000_000 // 6,
        output_bytes=1_000_000,
        crossing_bytes=1_000_000,
        load_ms=15_344 / 6,
        latency_ms=LatencyTable({1: {1.0: 1406.0 / 6}}),
    )
    layers = LayerProfile(
        blocks=(block,) * 6,
        load_ms=15_344,
        latency_ms=LatencyTable({1: {1.0: 1406.0}}),
        input_bytes=1_000_000,
        move_ms_per_mb=1.0,
        difference=0.0,
    )
    layered = replace(variant, profile=structs.replace(variant.profile, layers=layers))
    application = replace(application, stages=(replace(stage, variants=(layered,)),))
    return replace(made, deployment=replace(made.deployment, applications=(application,)))
