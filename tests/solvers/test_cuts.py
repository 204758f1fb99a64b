"""Cuts of models: the Flashpoint specification's exact cases, brute force, and what a real pipeline does."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.solvers.cuts import (
    LAYERS_MAX,
    PieceCosts,
    PieceDownloads,
    PiecePlan,
    best_plan,
    coarse_fronts,
    even_plan,
    expected_requests,
    plan_fronts,
    rounds_before,
)

EXACT = 1e-9
T5_COLD_S, T5_EXEC_S, T5_LAYERS = 25.974, 0.1406, 55
T5_TRANSFER_S = (1.1440674e-3,) * (T5_LAYERS - 1)
EQUAL_T5 = PieceCosts((T5_COLD_S / T5_LAYERS,) * T5_LAYERS, (T5_EXEC_S / T5_LAYERS,) * T5_LAYERS, T5_TRANSFER_S)
T5_MB = (131.60, *(201.33,) * 24, *(268.45,) * 24)
"""T5-3B from its architecture: embedding, 24 encoder and 24 decoder blocks."""


def random_costs(seed: int, layers: int, *, spread: float = 0.7, memory: bool = False) -> PieceCosts:
    random = np.random.default_rng(seed)
    cold, execution, size = (random.lognormal(0, spread, layers) for _ in range(3))
    transfer = 0.1 * random.lognormal(0, spread, layers - 1)
    limit = float(max(size.max(), size.sum() / 2)) if memory else np.inf
    return PieceCosts(
        tuple(10 * cold), tuple(execution), tuple(transfer), tuple(size) if memory else (), memory_bytes_max=limit
    )


def every_plan(costs: PieceCosts, pieces_max: int) -> list[PiecePlan]:
    cuts = [each for count in range(pieces_max) for each in combinations(range(1, costs.layers), count)]
    plans = [costs.plan(each) for each in cuts]
    return [plan for plan in plans if all(costs.fits(*piece) for piece in pieces_of(costs, plan))]


def pieces_of(costs: PieceCosts, plan: PiecePlan) -> list[tuple[int, int]]:
    ends = [0, *plan.cuts, costs.layers]
    return list(pairwise(ends))


# The specification's exact cases


def test_the_worked_example() -> None:
    """Section 2.3: execution 4 s, cold start 24 s, transfer 1 s, two devices, eight requests."""
    costs = PieceCosts((12.0, 12.0), (2.0, 2.0), (1.0,))
    halves = costs.plan((1,))
    assert costs.plan(()).mean_s(8, 2) == pytest.approx(34.0, abs=EXACT)
    assert halves.mean_s(8, 2, is_pipeline=False) == pytest.approx(34.5, abs=EXACT)
    assert halves.mean_s(8, 2) == pytest.approx(24.0, abs=EXACT)
    assert best_plan(plan_fronts(costs), 8, 2) == halves


def test_best_cuts_change_while_their_number_stays() -> None:
    """Section 2.5, first exact case: a plan that goes by the number of pieces alone would keep the first cut."""
    costs = PieceCosts((7, 17, 20), (2.5, 0.5, 2.0), (0.25, 0.25))
    fronts = plan_fronts(costs)
    found = [best_plan(fronts, requests, 2) for requests in range(1, 201)]
    assert [plan.cuts for plan in found if plan] == [(2,)] * 52 + [(1,)] * 148
    assert costs.plan((2,)).mean_s(10, 2) == pytest.approx(42.75, abs=EXACT)
    assert costs.plan((1,)).mean_s(100, 2) == pytest.approx(166, abs=EXACT)
    assert costs.plan((1,)).mean_s(53, 2) == costs.plan((2,)).mean_s(53, 2), "equal at 53: the earlier cut is taken"


def test_the_number_of_pieces_is_not_monotone_in_the_queue() -> None:
    """Section 2.5, second exact case: nine devices."""
    costs = PieceCosts((56, 46, 9), (2.5, 2.5, 3.0), (0.1, 0.25))
    fronts = plan_fronts(costs)
    found = [best_plan(fronts, requests, 9) for requests in range(1, 201)]
    assert [plan.pieces for plan in found[:9] if plan] == [2, 2, 2, 2, 2, 3, 2, 2, 3]
    assert {plan.pieces for plan in found[8:] if plan} == {3}
    assert found[0] is not None
    assert found[0].cuts == (1,)
    for requests, mean_s in ((6, 65.85), (7, 66.457143), (9, 67.35)):
        plan = found[requests - 1]
        assert plan is not None
        assert plan.mean_s(requests, 9) == pytest.approx(mean_s, abs=1e-6)


@pytest.mark.parametrize(
    ("devices", "benefits", "pieces"),
    [
        (2, (48.82, 42.80, 19.73, 8.21), (2, 2, 2, 2)),
        (16, (92.17, 90.37, 76.50, 57.00), (14, 14, 14, 8)),
        (55, (97.42, 96.94, 92.86, 84.91), (55, 55, 55, 55)),
    ],
)
def test_benefit_of_pieces_falls_with_the_queue(
    devices: int, benefits: tuple[float, ...], pieces: tuple[int, ...]
) -> None:
    """Check 3 of section 7.5: 55 equal layers, benefit over whole models in percent for 1, 100, 1000, 3000 requests."""
    fronts, whole = plan_fronts(EQUAL_T5), EQUAL_T5.plan(())
    for requests, benefit, count in zip((1, 100, 1000, 3000), benefits, pieces, strict=True):
        plan = best_plan(fronts, requests, devices)
        assert plan is not None
        assert plan.pieces == count
        found = 100 * (1 - plan.mean_s(requests, devices) / whole.mean_s(requests, devices))
        assert found == pytest.approx(benefit, abs=0.005)


def test_downloads_between_own_paths_and_one_link() -> None:
    """Section 2.3: with as many senders as copies each piece has a path of its own; with one, all share it. A chain
    sends each piece once."""
    alone = PieceDownloads(1.0, 8.0, 4.0, 4.0, senders=8, nodes=8, is_chain=False, is_shared=False)
    assert [alone.cold_s(1 / count, count, 8) for count in (1, 2, 4)] == [1 + 12 / count for count in (1, 2, 4)]
    one = replace(alone, senders=1)
    assert one.cold_s(1.0, 1, 8) == 1 + 8 + 8 * 4, "a copy for each"
    assert one.cold_s(0.25, 4, 8) == 1 + 2 + 2 * 4, "a copy for each pipeline"
    chain = replace(one, is_chain=True)
    assert [chain.cold_s(1 / count, count, 8) for count in (1, 2, 4)] == [1 + 8 / count + 4 for count in (1, 2, 4)]
    assert replace(chain, senders=2).cold_s(0.25, 4, 8) == 1 + 2 + 2
    beside = replace(one, nodes=4, is_shared=True)
    assert beside.cold_s(1.0, 1, 8) == 1 + 8 + 4 * 4, "a copy for each node"
    assert replace(chain, nodes=1, senders=8).cold_s(0.25, 4, 8) == 1 + 2 + 8, "all over the link of that node"
    assert replace(alone, download_s=0.0, send_s=0.0).cold_s(0.5, 2, 8) == 1 + 4


def test_a_pipeline_with_a_request_for_each_piece() -> None:
    """The example of section 2.3: two requests are on their way in 5 s, so one is answered every 2.5 s, not every 2."""
    there = PieceDownloads(0.0, 24.0, 0.0, 0.0, senders=1, nodes=2, is_chain=False, is_shared=False)
    costs = PieceCosts((0.5, 0.5), (2.0, 2.0), (1.0,))
    assert costs.plan(()).mean_s(8, 2, starts=there) == 34
    assert costs.plan((1,)).mean_s(8, 2, starts=there) == 12 + 5 + 2.5 * 3.5
    chosen = best_plan(plan_fronts(costs), 8, 2, starts=there)
    assert chosen is not None
    assert chosen.cuts == (1,)


def test_fourteen_pieces_until_2200_requests() -> None:
    """Check 3: of 14 and 16 pieces both have one of four layers, so 14 win, for they transfer less."""
    fronts = plan_fronts(EQUAL_T5)
    counts = [plan.pieces for requests in (2200, 2201) if (plan := best_plan(fronts, requests, 16))]
    assert counts == [14, 8]


def test_uneven_layers_of_t5() -> None:
    """Check 3, last sentence: layers drawn ±25 % around equal stay within two points, with all 16 devices used."""
    random = np.random.default_rng(5)
    cold, execution = (random.uniform(0.75, 1.25, T5_LAYERS) for _ in range(2))
    costs = PieceCosts(
        tuple(cold * T5_COLD_S / cold.sum()), tuple(execution * T5_EXEC_S / execution.sum()), T5_TRANSFER_S
    )
    plan = best_plan(plan_fronts(costs, 16), 1, 16)
    assert plan is not None
    assert plan.pieces == 16
    assert 100 * (1 - plan.mean_s(1, 16) / costs.plan(()).mean_s(1, 16)) == pytest.approx(92.17, abs=2)


def test_the_largest_layer_bounds_the_cold_start() -> None:
    """Check 4: one layer of 0.589 s and 54 of 25.385/54 s; 44.10 times faster, inference 43.94 % slower."""
    costs = PieceCosts((0.589, *(25.385 / 54,) * 54), EQUAL_T5.exec_s, T5_TRANSFER_S)
    plan = costs.plan(range(1, T5_LAYERS))
    assert plan.cold_s == pytest.approx(0.589, abs=EXACT)
    assert T5_COLD_S / plan.cold_s == pytest.approx(44.10, abs=0.005)
    assert 100 * (plan.request_s / costs.exec_whole_s - 1) == pytest.approx(43.94, abs=0.005)
    assert EQUAL_T5.plan(range(1, T5_LAYERS)).cold_s == pytest.approx(0.4723, abs=5e-5)


def test_the_architecture_of_t5_needs_49_pieces() -> None:
    """Section 3.2: cold starts in proportion to bytes, 49 layers that have weights: the largest takes 0.611 s."""
    costs = PieceCosts(
        tuple(T5_COLD_S * each / sum(T5_MB) for each in T5_MB),
        (T5_EXEC_S / len(T5_MB),) * len(T5_MB),
        T5_TRANSFER_S[: len(T5_MB) - 1],
    )
    assert costs.plan(range(1, len(T5_MB))).cold_s == pytest.approx(0.611, abs=5e-4)
    assert max(T5_MB) / sum(T5_MB) == pytest.approx(0.02353, abs=5e-5)


# Against brute force


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(1, 9), st.sampled_from([1, 3, 10, 50, 300, 2000]))
def test_equals_brute_force(seed: int, layers: int, devices: int, requests: int) -> None:
    """Check 2: the least mean of every plan there is, and equal plans only where two are equally good."""
    costs = random_costs(seed, layers)
    found = best_plan(plan_fronts(costs), requests, devices)
    assert found is not None
    least_s = min(plan.mean_s(requests, devices) for plan in every_plan(costs, min(layers, devices)))
    assert found.mean_s(requests, devices) == pytest.approx(least_s, rel=1e-12)
    again = costs.plan(found.cuts)
    assert again.cold_s == pytest.approx(found.cold_s)
    assert again.slowest_s == pytest.approx(found.slowest_s)
    assert again.transfers_s == pytest.approx(found.transfers_s)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 7), st.integers(2, 8), st.sampled_from([1, 10, 300]))
def test_equals_brute_force_under_a_memory_bound(seed: int, layers: int, devices: int, requests: int) -> None:
    costs = random_costs(seed, layers, memory=True)
    found = best_plan(plan_fronts(costs), requests, devices)
    plans = every_plan(costs, min(layers, devices))
    assert (found is None) == (not plans)
    if found is not None:
        assert all(costs.fits(*piece) for piece in pieces_of(costs, found))
        assert found.mean_s(requests, devices) == pytest.approx(min(plan.mean_s(requests, devices) for plan in plans))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 7), st.integers(1, 7), st.booleans())
def test_even_pieces_equal_brute_force(seed: int, layers: int, pieces: int, memory: bool) -> None:
    costs = random_costs(seed, layers, memory=memory)
    found = even_plan(costs, pieces)
    plans = [plan for plan in every_plan(costs, pieces) if plan.pieces == pieces]

    def largest_s(plan: PiecePlan) -> float:
        return max(costs.cold(*piece) + costs.exec(*piece) for piece in pieces_of(costs, plan))

    assert (found is None) == (not plans)
    if found is not None:
        assert found.pieces == pieces
        assert all(costs.fits(*piece) for piece in pieces_of(costs, found))
        assert largest_s(found) == pytest.approx(min(map(largest_s, plans)))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 7), st.integers(1, 7), st.booleans())
def test_the_plans_with_few_pieces_are_the_first_of_all(seed: int, layers: int, pieces: int, memory: bool) -> None:
    costs = random_costs(seed, layers, memory=memory)
    assert plan_fronts(costs, pieces) == plan_fronts(costs)[:pieces]


def test_models_of_many_layers_are_cut_between_groups_of_them() -> None:
    """The policies plan while requests wait: all plans of 500 layers would take minutes."""
    few = random_costs(3, LAYERS_MAX)
    assert coarse_fronts(few, 3) == plan_fronts(few, 3)
    some = random_costs(4, LAYERS_MAX + 30)
    exact, found = best_plan(plan_fronts(some, 4), 40, 4), best_plan(coarse_fronts(some, 4), 40, 4)
    assert exact is not None
    assert found is not None
    assert exact.mean_s(40, 4) <= found.mean_s(40, 4) <= 1.02 * exact.mean_s(40, 4)
    for count in (500, 3000):
        many = random_costs(5, count)
        plans = [plan for front in coarse_fronts(many, 4) for plan in front]
        assert len({cut for plan in plans for cut in plan.cuts}) < LAYERS_MAX
        for plan in plans:
            assert plan[1:] == pytest.approx(many.plan(plan.cuts)[1:])
    heavy = PieceCosts((0.0,) * 200 + (9.0,) + (0.0,) * 200, (0.0,) * 401, (1.0,) * 400)
    assert {plan.cuts for plan in coarse_fronts(heavy, 3)[2]} == {(1, 201)}


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 40))
def test_equal_plans_go_to_fewer_pieces_then_earlier_cuts(seed: int, layers: int, requests: int) -> None:
    """Small whole numbers make ties."""
    random = np.random.default_rng(seed)
    draw = [tuple(map(float, random.integers(1, 4, size))) for size in (layers, layers, layers - 1)]
    costs = PieceCosts(draw[0], draw[1], draw[2])
    fronts = plan_fronts(costs)
    for devices in range(1, layers + 1):
        plans = every_plan(costs, devices)
        first = min(plans, key=lambda plan: (plan.mean_s(requests, devices), plan.pieces))
        found = best_plan(fronts, requests, devices)
        assert found is not None
        assert (found.mean_s(requests, devices), found.pieces) == (first.mean_s(requests, devices), first.pieces)


def thesis_plan(costs: PieceCosts, requests: int, devices: int) -> PiecePlan:
    """The recursion as the thesis prints it: it splits a range of layers at the best place, as if the range were alone.

    The objective combines maxima and sums, so the best halves need not give the best whole. The result is never better
    than that of `best_plan`, and there is no bound on how much worse it is. For few layers only: O(L³ c²).
    """
    memory: dict[tuple[int, int, int], PiecePlan] = {}

    def value(first: int, end: int, plan: PiecePlan) -> float:
        waiting = rounds_before(requests, devices // plan.pieces) / requests
        return plan.cold_s + plan.slowest_s * waiting + costs.exec(first, end) + plan.transfers_s

    def best(first: int, end: int, cuts: int) -> PiecePlan:
        """The best plan of the layers before `end`, with at most this many cuts."""
        key = first, end, cuts
        if key not in memory:
            whole_s = costs.exec(first, end)
            found = best(first, end, cuts - 1) if cuts else PiecePlan((), costs.cold(first, end), whole_s, 0.0, whole_s)
            for plan in joined(first, end, cuts):
                if value(first, end, plan) < value(first, end, found):
                    found = plan
            memory[key] = found
        return memory[key]

    def joined(first: int, end: int, cuts: int) -> Iterator[PiecePlan]:
        for cut in range(first + 1, end) if cuts else ():
            moved_s = costs.transfer_s[cut - 1]
            for before in range(cuts):
                if before < cut - first and cuts - 1 - before < end - cut:
                    one, other = best(first, cut, before), best(cut, end, cuts - 1 - before)
                    yield PiecePlan(
                        (*one.cuts, cut, *other.cuts),
                        max(one.cold_s, other.cold_s),
                        max(one.slowest_s, other.slowest_s, moved_s),
                        one.transfers_s + other.transfers_s + moved_s,
                        costs.exec(first, end),
                    )

    return best(0, costs.layers, min(devices, costs.layers) - 1)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 7), st.integers(1, 9), st.integers(1, 2000))
def test_the_printed_recursion_is_never_better(seed: int, layers: int, devices: int, requests: int) -> None:
    costs = random_costs(seed, layers)
    printed = thesis_plan(costs, requests, devices)
    exact = best_plan(plan_fronts(costs), requests, devices)
    assert exact is not None
    assert exact.mean_s(requests, devices) <= printed.mean_s(requests, devices) + 1e-9


def test_the_printed_recursion_finds_the_best_of_easy_cases() -> None:
    costs = PieceCosts((12.0, 12.0), (2.0, 2.0), (1.0,))
    assert thesis_plan(costs, 8, 2).cuts == (1,)
    assert thesis_plan(costs, 8, 1).cuts == ()


def test_a_device_alone_needs_room_for_the_whole_model() -> None:
    fronts = plan_fronts(PieceCosts((1.0, 1.0), (1.0, 1.0), (0.1,), (5.0, 5.0), 6.0))
    assert best_plan(fronts, 1, 1) is None
    plan = best_plan(fronts, 1, 2)
    assert plan is not None
    assert plan.cuts == (1,)


# The formulas


def test_rounds_before_is_the_closed_form_of_the_sum() -> None:
    for groups in range(1, 8):
        for requests in range(1, 60):
            assert rounds_before(requests, groups) == sum(-(-place // groups) - 1 for place in range(1, requests + 1))


def line(execution: list[float], transfer: list[float], requests: int) -> float:
    """When the last of some requests leaves a line of stations without buffers: each blocks until the next is free."""
    stations = [duration for pair in zip(execution, [*transfer, 0.0], strict=True) for duration in pair][:-1]
    left = [0.0] * len(stations)
    for _ in range(requests):
        clock = left[0]
        for place, duration in enumerate(stations):
            done = clock + duration
            left[place] = clock = max(done, left[place + 1]) if place + 1 < len(stations) else done
    return left[-1]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 6), st.integers(1, 30))
def test_the_time_of_a_queue_is_that_of_a_real_line(seed: int, pieces: int, requests: int) -> None:
    """Section 2.3: exact where each piece and each transfer is a station of its own."""
    random = np.random.default_rng(seed)
    execution, transfer = random.uniform(0.1, 3, pieces).tolist(), random.uniform(0.1, 3, pieces - 1).tolist()
    plan = PieceCosts((1.0,) * pieces, tuple(execution), tuple(transfer)).plan(range(1, pieces))
    passed_s = plan.last_s(requests, pieces) - plan.cold_s
    assert passed_s == pytest.approx(line(execution, transfer, requests), rel=1e-9)


def test_the_mean_is_that_of_all_requests() -> None:
    plan = random_costs(3, 5).plan((1, 3))
    for devices in (3, 7, 9):
        each = [plan.last_s(requests, devices) for requests in range(1, 41)]
        assert plan.mean_s(40, devices) == pytest.approx(sum(each) / 40)


def test_a_shared_link_carries_a_copy_for_each_pipeline() -> None:
    """Section 2.3: all pieces of all pipelines come over one link; whole models take as many copies as devices."""
    costs = PieceCosts((1.0, 1.0), (2.0, 2.0), (1.0,))
    whole, halves = costs.plan(()), costs.plan((1,))
    assert whole.mean_s(1, 4, shared_download_s=10.0) - whole.mean_s(1, 4) == pytest.approx(40)
    assert halves.mean_s(1, 4, shared_download_s=10.0) - halves.mean_s(1, 4) == pytest.approx(20)


# The planners it is compared with


@pytest.mark.parametrize(
    ("queued", "arrival_rps", "service_rps", "expected"),
    [
        (0, 57, 71, 1),
        (40, 57, 71, 40),
        (0, 100, 71.1, 795),
        (100, 100, 71.1, 895),
        (0, 267, 71, 3000),
        (5000, 0, 9, 3000),
    ],
)
def test_expected_requests(queued: int, arrival_rps: float, service_rps: float, expected: int) -> None:
    """Section 2.6: a queue, and the excess during the 27.501 s in which T5 starts from another host; 1 to 3,000."""
    assert expected_requests(queued, arrival_rps, service_rps, 27.501) == expected
