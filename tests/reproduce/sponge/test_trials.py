"""Trials are values, and their outcomes depend on nothing else."""

from msgspec import structs

from sloop.core.views import Bucket, ClusterView
from sloop.policies.scale.sponge import Sponge
from sloop.reproduce.sponge.evaluation import FA2_WARM, SPONGE, STATIC_16
from sloop.reproduce.sponge.trials import SECONDS, KnownRate, Oracle, link_of, play, world_of
from sloop.units import s
from sloop.vocabulary import Node, Plan
from tests.policies.conftest import make_stage, make_view


def test_the_same_trial_has_the_same_outcome() -> None:
    assert play(SPONGE[0.9]) == play(SPONGE[0.9])
    assert play(SPONGE[0.9]) != play(structs.replace(SPONGE[0.9], seed=1))


def test_static_16_holds_sixteen_cores_and_fa2_starts_what_it_is_told_to() -> None:
    static = play(STATIC_16)
    assert set(static.cores_by_second) == {16.0}
    assert len(static.by_second) == SECONDS
    assert play(FA2_WARM).cores_by_second[0] == 4.0


def test_the_world_is_the_trials() -> None:
    world = world_of(structs.replace(STATIC_16, ratio=1.1, resize_ms=7.0, semantics="attach", profile_error=1.3))
    assert (world.truth.service.ratio, world.truth.resize_ms, world.truth.profile_error) == (1.1, 7.0, 1.3)
    assert world.truth.network is not None
    assert world.truth.network.semantics == "attach"
    assert world.application.cluster == (Node("n0", "Intel Xeon Gold 6240R", 16.0, 192 * 2**30),)


class Curious:
    """A scaler that remembers what it saw."""

    period_ns = s(1)

    def __init__(self) -> None:
        self.slack_ns: list[int] = []

    def plan(self, now_ns: int, view: ClusterView) -> Plan | None:
        self.slack_ns = view.stages[0].buckets[-1].slack_ns
        return None


def test_the_oracle_knows_the_coming_second() -> None:
    link, inner = link_of(""), Curious()
    oracle = Oracle(inner, link, 284 * 1024)
    stage = make_stage(Bucket(start_ns=0, slack_ns=[5]), name="detect")
    oracle.plan(s(7), make_view(stage, nodes=()))
    assert inner.slack_ns == [s(1) - link.transfer_ns(s(7), 284 * 1024)] * 20
    assert oracle.period_ns == Sponge().period_ns
    assert KnownRate(20).demand_rps(0, stage) == 20


def test_an_oracle_and_a_monitored_rate_can_be_played() -> None:
    oracle = play(structs.replace(SPONGE[0.9], oracle=True))
    monitored = play(structs.replace(SPONGE[0.9], told=False))
    assert oracle.violations < monitored.violations
