"""IPA and those it is compared with."""

from typing import Any

import pytest

from sloop.actions import StartWorker
from sloop.app.application import Application, Estimates, Stage, SystemChoice, Variant
from sloop.app.scenario import ServiceTruth, Truth
from sloop.policies.batch import Full
from sloop.policies.drop import Age
from sloop.policies.order import Fifo
from sloop.policies.route import RoundRobin
from sloop.profile.profile import Profile, Quadratic
from sloop.runlog.summary import RunSummary
from sloop.sim.run import simulate
from sloop.sim.world import World
from sloop.systems import build_system
from sloop.systems.setup import set_up
from sloop.units import s
from sloop.vocabulary import Node
from sloop.workload.generate import generated, kind_of
from sloop_systems.ipa.lstm import Lstm
from sloop_systems.ipa.policy import Ipa
from tests.sloop_systems.ipa.scene import CLASSIFICATION, DETECTION


@pytest.mark.parametrize(
    ("name", "kind", "scale"),
    [
        ("ipa", "system", Ipa()),
        ("fa2-low", "baseline", Ipa(only="lightest")),
        ("fa2-high", "baseline", Ipa(only="heaviest")),
        ("rim", "baseline", Ipa(replicas=4)),
    ],
)
def test_they_share_all_but_what_may_be_chosen(name: str, kind: str, scale: Ipa) -> None:
    system = build_system(name)
    assert system.kind == kind
    policies = system.policies
    assert (policies.order, policies.batch, policies.route) == (Fifo(), Full(patience=1.0), RoundRobin())
    assert (policies.drop, policies.forecast) == (Age(limit=2.0), Lstm("ipa"))
    assert policies.scale == scale
    assert policies.scale.interval_ns == s(10)


def test_stages_are_written_as_mappings() -> None:
    written = {"alpha": 2, "stages": {"detect": {"cores": {"n": 1}, "threshold_rps": 4}}}
    scale = build_system("ipa", written).policies.scale
    assert isinstance(scale, Ipa)
    assert scale.stages["detect"].cores == {"n": 1}


def pipeline(rate_rps: float, *, shape: str = "uniform", system: str = "ipa", **parameters: Any) -> World:
    """Detection and classification as in the specification's reference profile, a minute of even arrivals."""
    stages = []
    for name, family, after in (("detect", DETECTION, ()), ("classify", CLASSIFICATION, ("detect",))):
        variants = tuple(
            Variant(
                variant,
                accuracy=accuracy,
                profile=Profile(latency_ms=Quadratic(0, 1000 * each, 1000 * fixed), max_batch=8, max_cores=8),
            )
            for variant, (accuracy, _, each, fixed) in family.items()
        )
        stages.append(Stage(name, variants, after))
    written = {"alpha": 2, "beta": 1, "initial_rps": rate_rps, "forecast": "last", **parameters}
    application = Application(
        name="video",
        slo_ms=6890,
        stages=tuple(stages),
        system=SystemChoice(system, written),
        cluster=(Node("n", "local", 64, 1 << 40),),
        estimates=Estimates(correct=False),
    )
    trace = generated(kind_of({"kind": shape, "rate": rate_rps}), seed=1, duration_ns=s(60))
    truth = Truth(service=ServiceTruth(ratio=1.0, cv=0.0))
    return World.of(application, trace, seed=1, duration_ns=s(60), truth=truth)


@pytest.mark.parametrize("rate_rps", [5, 7, 10, 20, 30])
def test_what_it_plans_is_in_time(rate_rps: float) -> None:
    """Evenly spaced arrivals keep the deadline wherever a fifth of it is to spare (specification 7.5, property 5)."""
    world = pipeline(rate_rps)
    summary = RunSummary(set_up(world.deployment).parts(), nodes=world.deployment.cluster, start_ns=0)
    simulate(world, [summary])
    row = summary.row(system="ipa", seed=1)
    assert row.requests == pytest.approx(60 * rate_rps, abs=1)
    assert row.attainment >= 0.99


def test_no_request_is_lost_in_a_switch_of_variants() -> None:
    """The rate rises so far that accuracy has to go: other variants start, take over, and the old ones stop."""
    world = pipeline(20, initial_rps=1.0, alpha=20, drop="never")
    records: list[Any] = []

    class Listed:
        def append(self, now_ns: int, record: Any) -> None:
            records.append(record)

    summary = RunSummary(set_up(world.deployment).parts(), nodes=world.deployment.cluster, start_ns=0)
    simulate(world, [summary, Listed()])
    row = summary.row(system="ipa", seed=1)
    started = {record.spec.variant for record in records if isinstance(record, StartWorker)}
    assert len(started) > 2
    assert row.served + row.late == row.requests
