"""The vpa system is the published one unless told otherwise."""

from sloop.policies.scale.vpa import Vpa
from sloop.systems import build_system
from sloop.units import s


def test_published_parameters() -> None:
    system = build_system("vpa")
    assert system.kind == "baseline"
    assert system.policies.scale == Vpa()
    assert (Vpa().target, Vpa().settle_ns) == (0.7, s(60))
