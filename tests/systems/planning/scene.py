"""Applications to plan for: a profile of a few figures, a graph, a cluster, a system."""

from pathlib import Path
from typing import Any, Final

from sloop.app.load import load_application
from sloop.systems.planning.placement import Placement
from sloop.systems.planning.steady import steady_plans
from sloop.systems.planning.timing import Arrivals, PlanPrediction
from sloop.systems.setup import ApplicationSetup, Setup, set_up
from sloop.vocabulary import Plan

ENOUGH: Final = str(Path(__file__).with_name("enough.py"))
"""A system that plans the fewest replicas that serve the rate."""


def profile(each: float = 10.0, more: float = 0.0, *, batch: int = 4, cores: float = 4) -> dict[str, Any]:
    """`each` ms for every request of a batch, shared by the cores, and `more` ms for the batch."""
    form = {"form": "amdahl", "gamma": each, "epsilon": 0, "delta": 0, "eta": more}
    return {"latency_ms": form, "max_batch": batch, "max_cores": cores, "memory_bytes": 1000}


def stage(name: str, after: str | list[str] = "", **how: Any) -> dict[str, Any]:
    """A stage of 10 ms a request unless `how` says otherwise."""
    return {"name": name, "profile": profile()} | ({"after": after} if after else {}) | how


def nodes(cores: float = 4, count: int = 2, memory_bytes: int = 1_000_000) -> dict[str, Any]:
    return {"nodes": [{"hardware": "custom", "cores": cores, "memory_bytes": memory_bytes, "count": count}]}


def setup(*stages: dict[str, Any], slo_ms: float = 100, cluster: dict[str, Any] | None = None, **more: Any) -> Setup:
    """`more` are keys of the file; the system is `static` unless they name one."""
    document = {"name": "x", "slo_ms": slo_ms, "stages": list(stages), "system": "static"}
    return set_up(load_application(document | {"cluster": cluster or nodes()} | more), must_fit=False)


def only(made: Setup) -> ApplicationSetup:
    """The only application of a setup."""
    (application,) = made.applications
    return application


def steady_plan(made: Setup, rate_rps: float) -> Plan:
    """The plan that the only application keeps."""
    (plan,) = steady_plans(made.applications, {made.application.key: rate_rps}).plans.values()
    return plan


def predicted(made: Setup, rate_rps: float, arrivals: Arrivals = "even") -> PlanPrediction:
    """The prediction for the plan that the only application keeps."""
    return PlanPrediction(only(made), steady_plan(made, rate_rps), rate_rps, arrivals)


def placed(made: Setup, plan: Plan) -> Placement:
    """The only application's plan on its cluster."""
    return Placement(made.applications, {made.application.key: plan}, made.deployment.cluster)


READING = (
    stage("detect", profile=profile(20, 10)),
    stage("read", "detect", each={"output": "boxes", "mean": 5, "most": 50}),
    stage("digits", "detect", when={"output": "kind", "is": 1, "share": 0.25}),
)
"""Every picture is detected in, has five boxes to read on average, and digits in one of four."""
