"""IPA and those it is compared with."""

import pytest

from sloop.policies.batch.full import Full
from sloop.policies.drop.age import Age
from sloop.policies.forecast.lstm import Lstm
from sloop.policies.order.fifo import Fifo
from sloop.policies.route.round_robin import RoundRobin
from sloop.policies.scale.ipa import Ipa
from sloop.systems import build_system
from sloop.units import s


@pytest.mark.parametrize(
    ("name", "kind", "scale"),
    [
        ("ipa", "system", Ipa()),
        ("fa2-low", "baseline", Ipa(only="lightest")),
        ("fa2-high", "baseline", Ipa(only="heaviest")),
        ("rim", "baseline", Ipa(replicas=4)),
    ],
)
def test_they_share_all_but_what_may_be_chosen(name: str, kind: str, scale: Ipa) -> None:
    system = build_system(name)
    assert system.kind == kind
    policies = system.policies
    assert (policies.order, policies.batch, policies.route) == (Fifo(), Full(patience=1.0), RoundRobin())
    assert (policies.drop, policies.forecast) == (Age(limit=2.0), Lstm("ipa"))
    assert policies.scale == scale
    assert policies.scale.interval_ns == s(10)


def test_stages_are_written_as_mappings() -> None:
    written = {"alpha": 2, "stages": {"detect": {"cores": {"n": 1}, "threshold_rps": 4}}}
    scale = build_system("ipa", written).policies.scale
    assert isinstance(scale, Ipa)
    assert scale.stages["detect"].cores == {"n": 1}
