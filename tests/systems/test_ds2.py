"""ds2 as published."""

from sloop.policies.batch.work_conserving import WorkConserving
from sloop.policies.forecast.last import Last
from sloop.policies.order.fifo import Fifo
from sloop.policies.scale.ds2 import Ds2
from sloop.systems import build_system
from sloop.units import s


def test_published_parameters() -> None:
    system = build_system("ds2")
    assert system.kind == "baseline"
    assert system.policies.order == Fifo()
    assert system.policies.batch == WorkConserving()
    assert system.policies.forecast == Last(window_ns=s(10))
    assert system.policies.scale == Ds2(cores=1, period_ns=s(10))
