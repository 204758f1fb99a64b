"""The kpa system is the published one unless told otherwise."""

from sloop.policies.scale.kpa import Kpa
from sloop.systems import build_system
from sloop.units import s


def test_published_parameters() -> None:
    system = build_system("kpa")
    assert system.kind == "baseline"
    assert system.policies.scale == Kpa()
    assert (Kpa().stable_ns, Kpa().panic_ns, Kpa().period_ns, Kpa().zero_delay_ns) == (s(60), s(6), s(2), s(30))
    assert (Kpa().utilisation, Kpa().panic_threshold, Kpa().up_rate, Kpa().down_rate) == (0.7, 2.0, 1000.0, 2.0)
