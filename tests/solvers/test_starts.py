"""Starts that serve soonest: the mean of the earliest answers, and whether to start in parts, against brute force."""

from collections.abc import Sequence
from heapq import nsmallest
from itertools import combinations
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sloop.solvers import starts
from sloop.solvers.cuts import PieceCosts, PieceDownloads, plan_fronts
from sloop.solvers.starts import EXACT_PLANS, PlanColumns, ServerGroup, choose_parts, mean_answer_s

SECONDS = st.integers(1, 400).map(lambda tenths: tenths / 10)


def by_listing(servers: Sequence[ServerGroup], requests: int) -> float:
    """All answers that could be among the earliest, one after the other."""
    answers = [
        each.first_s + each.step_s * turn for each in servers for _ in range(each.servers) for turn in range(requests)
    ]
    return fmean(nsmallest(requests, answers))


@given(
    st.lists(st.builds(ServerGroup, st.integers(1, 4), SECONDS, SECONDS), min_size=1, max_size=4), st.integers(1, 60)
)
def test_requests_get_the_earliest_answers(servers: list[ServerGroup], requests: int) -> None:
    assert mean_answer_s(servers, requests) == pytest.approx(by_listing(servers, requests), rel=1e-6)


DOWNLOADS = PieceDownloads(
    process_s=0.0,
    local_s=6.0,
    download_s=4.0,
    send_s=4.0,
    senders=2,
    nodes=4,
    is_chain=True,
    is_shared=True,
)


@st.composite
def models(draw: st.DrawFn) -> PieceCosts:
    layers = draw(st.integers(2, 4))
    shares = draw(st.lists(st.integers(1, 9), min_size=layers, max_size=layers))
    execs = draw(st.lists(SECONDS, min_size=layers, max_size=layers))
    moves = draw(st.lists(st.integers(0, 20).map(lambda tenths: tenths / 10), min_size=layers - 1, max_size=layers - 1))
    return PieceCosts(tuple(share / sum(shares) for share in shares), tuple(execs), tuple(moves))


def least_mean_s(costs: PieceCosts, whole_s: Sequence[float], requests: int) -> float:
    """The least over all cuts and all numbers of equal pipelines, the rest being whole."""
    whole = [ServerGroup(1, at_s + costs.exec_whole_s, costs.exec_whole_s) for at_s in whole_s]
    found = [by_listing(whole, requests)]
    for count in range(1, min(len(whole_s), costs.layers)):
        for cuts in combinations(range(1, costs.layers), count):
            plan = costs.plan(cuts)
            for pipelines in range(1, len(whole_s) // plan.pieces + 1):
                devices = pipelines * plan.pieces
                ready_s = DOWNLOADS.cold_s(plan.cold_s, plan.pieces, devices)
                step_s = max(plan.slowest_s, plan.request_s / plan.pieces)
                line = ServerGroup(pipelines, ready_s + plan.request_s, step_s)
                found.append(by_listing([*whole[: len(whole) - devices], line], requests))
    return min(found)


@given(models(), st.lists(SECONDS, min_size=1, max_size=4), st.integers(1, 12))
def test_a_small_model_is_cut_as_is_best(costs: PieceCosts, whole_s: list[float], requests: int) -> None:
    columns = PlanColumns.of(plan_fronts(costs))
    found = choose_parts(whole_s, columns, DOWNLOADS, costs.exec_whole_s, requests, costs.layers)
    assert found.mean_s == pytest.approx(least_mean_s(costs, whole_s, requests), rel=1e-5)
    if found.pipelines:
        assert found.pipelines * (len(found.cuts) + 1) <= len(whole_s)


@given(models(), st.integers(1, 4), st.integers(1, 12))
def test_the_quick_search_is_as_good_where_all_starts_are_equal(costs: PieceCosts, devices: int, requests: int) -> None:
    """With more plans than are compared one by one, each number of devices gets its best plan (section 2.4)."""
    whole_s = [DOWNLOADS.cold_s(1.0, 1, devices)] * devices
    fronts = plan_fronts(costs)
    columns = PlanColumns.of(fronts)
    whole = mean_answer_s([ServerGroup(devices, whole_s[0] + costs.exec_whole_s, costs.exec_whole_s)], requests)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(starts, "EXACT_PLANS", 0)
        quick = choose_parts(whole_s, columns, DOWNLOADS, costs.exec_whole_s, requests, costs.layers)
    exact = choose_parts(whole_s, columns, DOWNLOADS, costs.exec_whole_s, requests, costs.layers)
    assert exact.mean_s <= quick.mean_s * (1 + 1e-6) <= whole * (1 + 2e-6)
    best = min(
        (plan.mean_s(requests, devices, starts=DOWNLOADS) for front in fronts[:devices] for plan in front),
        default=whole,
    )
    assert quick.mean_s <= best * (1 + 1e-5)


@st.composite
def downloads(draw: st.DrawFn) -> PieceDownloads:
    return PieceDownloads(
        process_s=draw(SECONDS),
        local_s=draw(SECONDS),
        download_s=draw(st.sampled_from((0.0, 2.5, 40.0))),
        send_s=draw(SECONDS),
        senders=draw(st.integers(1, 5)),
        nodes=draw(st.integers(1, 5)),
        is_chain=draw(st.booleans()),
        is_shared=draw(st.booleans()),
    )


@given(models(), downloads(), st.integers(1, 5))
def test_many_plans_start_as_each_of_them(costs: PieceCosts, given_starts: PieceDownloads, pipelines: int) -> None:
    columns = PlanColumns.of(plan_fronts(costs))
    together = given_starts.cold_each_s(columns.share, columns.pieces, pipelines)
    alone = [given_starts.cold_s(each.cold_s, each.pieces, pipelines * each.pieces) for each in columns.plans]
    assert together.tolist() == pytest.approx(alone)


def test_few_plans_are_compared_for_a_large_model() -> None:
    """55 layers and 16 starts: the work stays bounded."""
    costs = PieceCosts((1 / 55,) * 55, (0.1406 / 55,) * 55, (0.001,) * 54)
    counted: list[int] = []

    def mean_s(servers: Sequence[ServerGroup], requests: int) -> float:
        counted.append(requests)
        return mean_answer_s(servers, requests)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(starts, "mean_answer_s", mean_s)
        found = choose_parts([27.5] * 16, PlanColumns.of(plan_fronts(costs, 16)), DOWNLOADS, 0.1406, 40, 55)
    assert found.pipelines > 0
    assert len(counted) <= EXACT_PLANS + 1
