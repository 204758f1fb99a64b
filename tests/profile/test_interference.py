"""Laws of interference: the printed formulas, what every law promises, and how profiles contain them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sloop.profile.estimate import Estimate
from sloop.profile.interference import (
    NO_SLOWDOWN,
    SHARE_EXPONENT,
    BandwidthLaw,
    CountLaw,
    DeviceDemand,
    PairLaw,
    ProcessorSharing,
    ScalabilityLaw,
    ShareLaw,
    Slowdown,
)
from sloop.profile.profile import Amdahl, DeviceSharing, Profile, Quadratic
from sloop.units import ms
from sloop.vocabulary import Slot

parts = st.floats(0, 1)
demands = st.builds(
    DeviceDemand,
    variant=st.sampled_from(["a", "b"]),
    full=st.floats(0.05, 1),
    bandwidth=parts,
    sm_use=parts,
    occupancy=parts,
)
laws: st.SearchStrategy[Slowdown] = st.one_of(
    st.builds(BandwidthLaw, st.floats(0, 2)),
    st.lists(st.floats(0, 3), max_size=5).map(lambda steps: CountLaw(tuple(accumulate(steps, initial=1.0)))),
    st.builds(ScalabilityLaw, st.floats(0, 2), st.floats(0, 1)),
    st.builds(PairLaw, st.fixed_dictionaries({"a": st.floats(1, 4)}), st.floats(1, 4)),
    st.builds(ProcessorSharing, st.sampled_from(["bandwidth", "sm_use", "occupancy", "batches"])),
)


@given(laws, demands, st.lists(demands, max_size=6))
def test_alone_nobody_is_slower_and_each_neighbour_makes_it_worse(
    law: Slowdown, own: DeviceDemand, others: Sequence[DeviceDemand]
) -> None:
    factors = [law.slowdown(own, others[:count]) for count in range(len(others) + 1)]
    assert factors[0] == 1.0
    assert all(after >= before - 1e-9 for before, after in pairwise(factors))


@given(laws, demands, st.integers(1, 7))
def test_equal_batches_together(law: Slowdown, own: DeviceDemand, count: int) -> None:
    [factor] = law.among_equals(own, np.array([float(count)]))
    assert factor == pytest.approx(law.slowdown(own, [own] * (count - 1)), rel=1e-9)


@given(laws)
def test_a_law_survives_its_file(law: Slowdown) -> None:
    assert msgspec.json.decode(msgspec.json.encode(law), type=Slowdown) == law


def test_the_bandwidth_law_as_it_is_printed_and_as_it_is_mended() -> None:
    own = DeviceDemand(bandwidth=0.5)
    literal, convex = BandwidthLaw(0.0), BandwidthLaw(0.45)
    assert literal.slowdown(own, [own] * 3) == 2.0
    assert convex.slowdown(own, [own] * 3) == 2.0 * 1.45
    assert convex.slowdown(own, [DeviceDemand(bandwidth=0.4)]) == 1.0
    assert convex.among_equals(own, np.array([3.2]))[0] == pytest.approx(1.6 * 1.27)


def test_a_table_goes_on_with_its_last_slope_and_counts_parts_of_batches() -> None:
    law = CountLaw((1.0, 1.2, 2.0))
    full, half = DeviceDemand(), DeviceDemand(full=0.5)
    assert [law.slowdown(full, [full] * others) for others in range(5)] == pytest.approx([1.0, 1.2, 2.0, 2.8, 3.6])
    assert law.slowdown(full, [half]) == pytest.approx(1.1)
    assert law.slowdown(half, []) == 1.0


def test_what_overlaps_makes_each_further_batch_cheaper_and_what_is_disturbed_dearer() -> None:
    full, half = DeviceDemand(), DeviceDemand(full=0.5)
    law = ScalabilityLaw(0.64, 0.01)
    assert [law.slowdown(full, [full] * others) for others in range(4)] == pytest.approx([1.0, 1.66, 2.34, 3.04])
    assert law.slowdown(full, [half]) == pytest.approx(1.0 + 0.5 * (0.64 + 0.015))
    assert law.slowdown(half, []) == 1.0
    counts = np.arange(1.0, 13)
    costs = law.among_equals(full, counts) / counts
    assert counts[costs.argmin()] == 6.0, "sqrt((1 - 0.64) / 0.01)"


def test_pairs_add_what_each_neighbour_costs() -> None:
    law = PairLaw({"vgg": 1.5}, other=1.1)
    beside = [DeviceDemand("vgg"), DeviceDemand("vgg"), DeviceDemand("bert")]
    assert law.slowdown(DeviceDemand("resnet"), beside) == pytest.approx(2.1)


def test_a_device_divides_what_is_demanded_of_it() -> None:
    own, other = DeviceDemand(sm_use=0.6, bandwidth=0.1), DeviceDemand(sm_use=0.9, bandwidth=0.2)
    assert ProcessorSharing("sm_use").slowdown(own, [other]) == 1.5
    assert ProcessorSharing("bandwidth").slowdown(own, [other]) == 1.0
    assert ProcessorSharing("batches").slowdown(own, [other, other]) == 3.0


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ('{"form": "bandwidth", "alpha": -1}', "alpha is -1"),
        ('{"form": "count", "factors": []}', "factors is empty"),
        ('{"form": "count", "factors": [0.4, 0.5]}', "each must be at least 1"),
        ('{"form": "count", "factors": [1, 3, 2]}', "cannot make a batch faster"),
        ('{"form": "count", "factors": [1.5, 2]}', "the first factor is 1.5"),
        ('{"form": "scalability", "contention": -0.1}', "contention is -0.1"),
        ('{"form": "scalability", "contention": 0.5, "coherency": -1}', "coherency is -1"),
        ('{"form": "scalability"}', "missing required field `contention`"),
        ('{"form": "pairs", "factors": {"a": 0.5}}', "beside a is 0.5"),
        ('{"form": "cosine"}', "Invalid value 'cosine'"),
    ],
)
def test_a_law_that_cannot_be(text: str, wrong: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=wrong):
        msgspec.json.decode(text, type=Slowdown)


SHARING = DeviceSharing(
    law=BandwidthLaw(0.5), full_batch=8, bandwidth=0.8, sm_use={2: 0.2, 4: 0.4}, occupancy={4: 0.9}, is_capped=True
)


def test_what_batches_of_a_model_demand() -> None:
    assert SHARING.demand(4, share=0.3, variant="v") == DeviceDemand(
        "v", 4, 0.5, 0.4, 0.4, 0.9, share=0.3, is_capped=True
    )
    assert [SHARING.demand(batch).sm_use for batch in (1, 2, 3, 8)] == pytest.approx([0.2, 0.2, 0.3, 0.4])
    assert DeviceSharing(full_batch=4).law is NO_SLOWDOWN


@dataclass(frozen=True)
class Wrong:
    field: str
    value: object


@pytest.mark.parametrize(
    "wrong", [Wrong("full_batch", 0), Wrong("bandwidth", 1.2), Wrong("sm_use", {4: 2.0}), Wrong("occupancy", {0: 0.5})]
)
def test_parts_of_a_device_are_at_most_the_device(wrong: Wrong) -> None:
    with pytest.raises(ValueError, match=f"{wrong.field}.* is "):
        msgspec.structs.replace(SHARING, **{wrong.field: wrong.value})


def test_an_estimate_says_what_its_profile_says() -> None:
    profile = Profile(latency_ms=Quadratic(0, 1, 0), max_batch=8, max_cores=1, accelerator="T4", sharing=SHARING)
    belief = Estimate(profile, variant="v")
    own = belief.demand(8, Slot(1.0, "g", "T4", 0.5))
    assert own == SHARING.demand(8, share=0.5, variant="v")
    assert belief.interference is SHARING.law
    assert belief.shares_device
    silent = Estimate(msgspec.structs.replace(profile, sharing=None), variant="v")
    assert not silent.shares_device
    assert silent.demand(3, Slot(1.0)) == DeviceDemand("v", 3)
    assert silent.interference.slowdown(own, [own]) == 1.0


def test_a_law_that_was_measured_without_caps_is_for_slots_without_caps() -> None:
    law = CountLaw((1.0, 1.8))
    sharing = DeviceSharing(law=law, full_batch=8, cores=2.0)
    profile = Profile(latency_ms=Amdahl(0, 8, 0, 2), max_batch=8, max_cores=4, sharing=sharing)
    belief, capped, reserved = Estimate(profile, variant="v"), Slot(0.5), Slot(0.5, is_capped=False)
    assert (belief.shares_device, belief.shares(capped), belief.shares(reserved)) == (True, False, True)
    assert belief.demand(8, capped) == DeviceDemand("v", 8)
    assert belief.demand(8, reserved) == sharing.demand(8, is_capped=False, variant="v")
    assert belief.demand(1, reserved).full == 1.0, "a small batch uses all cores, too"
    assert (belief.latency_ms(1, capped), belief.latency_ms(1, reserved)) == (18.0, 6.0)
    assert belief.costs_ns(reserved)[8] == ms(6)
    assert (belief.is_extrapolated(8, capped), belief.is_extrapolated(8, reserved)) == (False, False)
    by_hand = Estimate(msgspec.structs.replace(profile, sharing=msgspec.structs.replace(sharing, cores=0.0)))
    assert by_hand.shares(capped)
    assert by_hand.latency_ms(1, reserved) == 4.0, "as on all cores that the model can use"
    on_gpu = Estimate(msgspec.structs.replace(profile, accelerator="T4"))
    assert on_gpu.latency_ms(1, Slot(0.5, "g", "T4", 0.5, is_capped=False)) == 18.0, "its cores are a cap"


def test_a_share_that_is_no_cap_slows_nothing() -> None:
    sharing = DeviceSharing(law=ShareLaw(), full_batch=8, sm_use={8: 0.9}, is_capped=True)
    slow, free = (sharing.demand(8, share=0.3, is_capped=is_capped) for is_capped in (True, False))
    assert sharing.law.slowdown(slow, []) == pytest.approx(3**SHARE_EXPONENT)
    assert sharing.law.slowdown(free, []) == 1.0


@given(st.floats(0.1, 8), st.floats(0.1, 8), st.sampled_from(["", "T4"]), st.booleans(), st.integers(1, 8))
def test_reserved_cores_never_say_how_fast_a_replica_is(
    cores: float, others: float, accelerator: str, is_capped: bool, batch: int
) -> None:
    sharing = DeviceSharing(full_batch=8, cores=2.0)
    belief = Estimate(Profile(latency_ms=Amdahl(1, 8, 0, 2), max_batch=8, max_cores=4, sharing=sharing))
    one = Slot(cores, accelerator=accelerator, is_capped=is_capped)
    other = msgspec.structs.replace(one, cores=others)
    if is_capped or accelerator:
        assert (belief.latency_ms(batch, one) == belief.latency_ms(batch, other)) == (cores == others)
    else:
        assert belief.latency_ms(batch, one) == belief.latency_ms(batch, other)
        assert belief.costs_ns(one) == belief.costs_ns(other)
