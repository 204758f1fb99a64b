"""The queueing model: its formula against queues of evenly spaced arrivals played out."""

import math
from heapq import heapreplace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sloop.solvers.queueing import fill_ms, in_time, patience_ns, replicas_needed
from sloop.units import ms


def test_fill() -> None:
    assert fill_ms(1, 10.0) == 0.0
    assert fill_ms(5, 10.0) == 400.0
    assert fill_ms(5, 0.0) == 0.0


def test_replicas() -> None:
    assert replicas_needed(0.0, 4, 100.0) == 1
    assert replicas_needed(30.0, 1, 100.0) == 3
    assert replicas_needed(30.0 + 1e-12, 1, 100.0) == 3, "a sum of floats does not cost a replica"
    assert replicas_needed(30.1, 1, 100.0) == 4
    assert replicas_needed(30.0, 2, 100.0) == 2


def worst_ms(rate_rps: float, batch: int, latency_ms: float, replicas: int, batches: int) -> float:
    """The longest that the first of a batch is in the stage: even arrivals, full batches, replicas in turn."""
    gap_ms = 1000.0 / rate_rps
    free_ms = [0.0] * replicas
    worst = 0.0
    for index in range(batches):
        first_ms, full_ms = index * batch * gap_ms, ((index + 1) * batch - 1) * gap_ms
        turn = index % replicas
        free_ms[turn] = max(full_ms, free_ms[turn]) + latency_ms
        worst = max(worst, free_ms[turn] - first_ms)
    return worst


@given(st.floats(0.1, 200.0), st.integers(1, 16), st.floats(1.0, 500.0), st.integers(0, 3))
def test_even_arrivals_never_wait_longer(rate_rps: float, batch: int, latency_ms: float, spare: int) -> None:
    replicas = replicas_needed(rate_rps, batch, latency_ms) + spare
    bound_ms = fill_ms(batch, rate_rps) + latency_ms
    assert worst_ms(rate_rps, batch, latency_ms, replicas, 60) <= bound_ms * (1 + 1e-6)


@given(st.floats(0.1, 200.0), st.integers(1, 16), st.floats(1.0, 500.0))
def test_one_replica_less_would_fall_behind(rate_rps: float, batch: int, latency_ms: float) -> None:
    replicas = replicas_needed(rate_rps, batch, latency_ms)
    needed = rate_rps * latency_ms / (1000.0 * batch)
    assert replicas >= needed - 1e-6
    assert replicas == 1 or replicas - 1 < needed
    assert math.isfinite(replicas)


def test_a_batch_is_waited_for_twice_its_time_but_never_most_of_the_deadline() -> None:
    assert patience_ns(20, ms(1000)) == ms(40)
    assert patience_ns(200, ms(1000)) == ms(250)
    assert patience_ns(0, ms(1000)) == 0


@pytest.mark.parametrize(("servers", "service_s", "deadline_s"), [(1, 0.1, 0.2), (1, 0.1, 0.5), (4, 0.18, 0.72)])
@pytest.mark.parametrize("load", [0.5, 0.8, 0.95, 1.0, 1.2, 3.0])
def test_what_is_in_time_is_what_a_simulated_queue_answers(
    servers: int, service_s: float, deadline_s: float, load: float
) -> None:
    """Poisson arrivals, constant durations, and whoever would be late is dropped."""
    rate_rps, chance = load * servers / service_s, Random(1)
    free_s, now_s, served, count = [0.0] * servers, 0.0, 0, 20_000
    for _ in range(count):
        now_s += chance.expovariate(rate_rps)
        ready_s = max(now_s, free_s[0]) + service_s
        if ready_s <= now_s + deadline_s:
            served += 1
            heapreplace(free_s, ready_s)
    found = in_time(rate_rps, servers, servers / service_s, 1e3 * service_s, 1e3 * deadline_s)
    assert found == pytest.approx(served / count, abs=0.04)


def test_more_servers_answer_more_in_time_and_none_answer_nothing() -> None:
    each_rps = 10.0
    shares = [in_time(40, servers / 2, servers / 2 * each_rps, 100, 300) for servers in range(20)]
    assert shares == sorted(shares)
    assert (shares[0], round(shares[-1], 6)) == (0.0, 1.0)
    assert in_time(40, 20, 200, 301, 300) == 0.0
    assert in_time(0, 1, 10, 100, 300) == 1.0
