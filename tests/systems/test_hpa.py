"""The hpa system is the published one unless told otherwise."""

from sloop.policies.scale.hpa import Hpa
from sloop.systems import build_system
from sloop.units import s


def test_published_parameters() -> None:
    system = build_system("hpa")
    assert system.kind == "baseline"
    assert system.policies.scale == Hpa()
    assert (Hpa().target, Hpa().tolerance, Hpa().stabilisation_ns, Hpa().period_ns) == (0.8, 0.1, s(300), s(15))
