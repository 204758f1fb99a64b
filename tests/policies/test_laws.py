"""Laws of forecasts; those of all verbs, which policies of anybody obey, are in `sloop.testing.laws`."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.core.views import Bucket, Traffic
from sloop.errors import InputError
from sloop.options import keys_of
from sloop.systems.registry import POLICIES, build
from sloop.testing.views import make_arrivals
from sloop.units import ms, s

laws = settings(max_examples=50)
instants = st.integers(0, 200).map(ms)
LENGTHS_NS = (ms(1), ms(100), s(1), s(10))


def _keys(forecaster: str) -> tuple[str, ...]:
    return keys_of(POLICIES["forecast"][forecaster])


FORESEEN_MOST = {"times": 1.2}
"""Forecasts that by their nature go beyond what was seen, and how many times its largest second at most."""


@pytest.mark.parametrize("name", POLICIES["forecast"])
@laws
@given(counts=st.lists(st.integers(0, 100), max_size=30))
def test_a_forecast_lies_within_what_was_seen(name: str, counts: list[int]) -> None:
    demand_rps = build("forecast", name).demand_rps(s(30), make_arrivals(*counts))  # type: ignore[attr-defined]
    least = 0 if name in FORESEEN_MOST else min(counts, default=0)
    assert least - 1e-9 <= demand_rps <= FORESEEN_MOST.get(name, 1) * max(counts, default=0) + 1e-9


ODD = (0, -0.0, 5e-324, 1e-9, 0.3, 1, 1.5, 60, 1e6, 1e9, 1e10, 1e300, 1e308, math.inf, math.nan, -1e-9, -1, 10**400)


@pytest.mark.parametrize(("name", "key"), [(name, key) for name in POLICIES["forecast"] for key in _keys(name)])
@laws
@given(data=st.data(), counts=st.lists(st.integers(0, 10**7), max_size=30), length_ns=st.sampled_from(LENGTHS_NS))
def test_a_forecast_is_a_finite_rate_or_its_parameters_are_refused(
    name: str, key: str, data: st.DataObject, counts: list[int], length_ns: int
) -> None:
    odd = st.sampled_from(ODD)
    values = {"counts": st.lists(odd, max_size=3), "weights": st.sampled_from(["ipa", "biscale"])}
    others = [other for other in _keys(name) if other == "weights"]
    parameters = {each: data.draw(values.get(each, odd), label=each) for each in {key, *others}}
    try:
        policy = build("forecast", name, parameters)
    except InputError:
        return
    buckets = [Bucket(at * length_ns, arrivals=count) for at, count in enumerate(counts)]
    demand_rps = policy.demand_rps(data.draw(instants), Traffic(buckets=buckets, bucket_ns=length_ns))  # type: ignore[attr-defined]
    assert math.isfinite(demand_rps)
    assert demand_rps >= 0
    assert math.isfinite(1e6 * demand_rps), "nor is what a fan-out makes of it"
