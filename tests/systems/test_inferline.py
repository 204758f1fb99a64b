"""inferline as published."""

from sloop.policies.batch.full import Full
from sloop.policies.forecast.last import Last
from sloop.policies.order.fifo import Fifo
from sloop.policies.scale.inferline import Inferline
from sloop.systems import build_system
from sloop.units import s


def test_published_parameters() -> None:
    system = build_system("inferline")
    assert system.kind == "baseline"
    assert system.policies.order == Fifo()
    assert system.policies.batch == Full()
    assert system.policies.forecast == Last(window_ns=s(10))
    assert system.policies.scale == Inferline(cores=1, period_ns=s(10))
