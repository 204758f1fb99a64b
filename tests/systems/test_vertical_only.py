"""The vertical-only system: one replica of each stage, and Biscale's other policies."""

from dataclasses import replace

from sloop.policies.forecast.last import Last
from sloop.policies.scale.vertical import Vertical
from sloop.systems import build_system
from sloop.units import s


def test_published_parameters() -> None:
    system, biscale = build_system("vertical-only"), build_system("biscale").policies
    assert system.kind == "baseline"
    assert system.policies == replace(biscale, scale=Vertical(replicas=1), forecast=Last(window_ns=s(2)))
