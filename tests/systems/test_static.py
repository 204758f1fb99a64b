"""The static system."""

from sloop.policies.scale.static import Static
from sloop.systems import build_system


def test_static_8_of_the_papers_is_one_line() -> None:
    system = build_system("static", {"cores": 8})
    assert system.kind == "baseline"
    assert system.policies.scale == Static(replicas=1, cores=8)
