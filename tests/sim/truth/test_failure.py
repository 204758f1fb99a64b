from sloop.sim.truth.failure import FaultRates, FaultSampler
from sloop.units import FOREVER_NS, s


def test_disabled_faults_never_happen() -> None:
    failure = FaultSampler(1)
    assert not failure.strikes("straggler", 0.0)
    assert failure.after_ns("crash", 0.0) == FOREVER_NS


def test_probabilities_and_means_are_kept() -> None:
    failure = FaultSampler(1)
    assert 250 < sum(failure.strikes("straggler", 0.3) for _ in range(1_000)) < 350
    gaps_ns = [failure.after_ns("crash", 3.0) for _ in range(2_000)]
    assert s(2.8) < sum(gaps_ns) / len(gaps_ns) < s(3.2)
    assert max(failure.within_ns("late_finished", s(1)) for _ in range(100)) <= s(1)


def test_one_kind_does_not_shift_another() -> None:
    alone, beside = FaultSampler(1), FaultSampler(1)
    for _ in range(10):
        beside.strikes("straggler", 0.5)
    assert [alone.after_ns("crash", 1.0) for _ in range(5)] == [beside.after_ns("crash", 1.0) for _ in range(5)]


def test_fault_rates_report_whether_they_affect_batches() -> None:
    assert not FaultRates(crash_mtbf_s=1.0, cancelled=0.5).touches_batches
    assert FaultRates(lost_finished=0.1).touches_batches
