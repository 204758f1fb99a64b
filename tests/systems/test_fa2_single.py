"""FA2 for one model as the baseline of Sponge."""

from sloop.policies.order.fifo import Fifo
from sloop.policies.route.round_robin import RoundRobin
from sloop.policies.scale.fa2_single import Fa2Single
from sloop.systems import build_system


def test_published_parameters() -> None:
    system = build_system("fa2-single")
    assert system.kind == "baseline"
    assert system.policies.order == Fifo()
    assert system.policies.route == RoundRobin()
    assert system.policies.scale == Fa2Single(cores=1, replicas_max=16, initial=1, batch_max=8, margin=0.9)
