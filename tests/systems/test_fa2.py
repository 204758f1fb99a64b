"""fa2 as published."""

from sloop.policies.batch.full import Full
from sloop.policies.forecast.last import Last
from sloop.policies.order.fifo import Fifo
from sloop.policies.scale.fa2 import Fa2
from sloop.systems import build_system
from sloop.units import s


def test_published_parameters() -> None:
    system = build_system("fa2")
    assert system.kind == "system"
    assert system.policies.order == Fifo()
    assert system.policies.batch == Full()
    assert system.policies.forecast == Last(window_ns=s(10))
    assert system.policies.scale == Fa2(cores=1, period_ns=s(10))
