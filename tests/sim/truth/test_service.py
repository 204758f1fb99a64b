import pytest

from sloop.profile import Amdahl, Profile, Quadratic
from sloop.sim.truth.service import Service

A = ("only", "a")
PROFILE = Profile(latency_ms=Amdahl(gamma=8.0, epsilon=4.0, delta=1.0, eta=2.0), max_batch=4, max_cores=8)


def test_means_follow_the_profile_over_ratio_times_error() -> None:
    plain = Service(1, {A: PROFILE}).means_ns(*A, 2.0)
    assert plain == pytest.approx([0.0, 9e6, 14e6, 19e6, 24e6])
    wrong = Service(1, {A: PROFILE}, ratio=1.25, errors={A: 2.0}).means_ns(*A, 2.0)
    assert wrong == pytest.approx([mean_ns * 2.0 / 1.25 for mean_ns in plain])


def test_means_are_worked_out_once() -> None:
    service = Service(1, {A: PROFILE})
    assert service.means_ns(*A, 4.0) is service.means_ns(*A, 4.0)


def test_a_fit_that_goes_negative_takes_next_to_no_time() -> None:
    steep = Profile(latency_ms=Quadratic(alpha=-1.0, beta=3.0, gamma=1.0), max_batch=3, max_cores=1)
    assert min(Service(1, {A: steep}).means_ns(*A, 1.0)[1:]) > 0
