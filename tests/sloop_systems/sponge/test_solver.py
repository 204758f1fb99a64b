"""Sponge's Algorithm 2: closed form against printed loop, the published pairs, and what the paper leaves open."""

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sloop.profile.profile import Amdahl
from sloop.profile.published import RESNET_T, RESNET_T_CELLS, YOLOV5S_S
from sloop_systems.sponge import solver as sponge
from sloop_systems.sponge.solver import SpongeGrid

SLO_MS = 1000.0
FITTED_WHOLE_MS = Amdahl(18.290, 45.469, 4.488, 1.046).latency_ms
"""Four parameters fitted to a ResNet18 human classifier's grid, latencies cut to whole ms, as in Sponge's artefact."""
RESNET_T_MS = RESNET_T.latency_ms.latency_ms
YOLO_MS = YOLOV5S_S.latency_ms.latency_ms


def grid_from(latency_ms: Callable[[int, float], float], cores_max: int = 16, batch_max: int = 16) -> SpongeGrid:
    cores = tuple(float(c) for c in range(1, cores_max + 1))
    return SpongeGrid(cores, np.array([[latency_ms(b, c) for b in range(1, batch_max + 1)] for c in cores]))


def algorithm_2(grid: SpongeGrid, count: int, network_ms_max: float, slo_ms: float) -> tuple[float, int] | None:
    """The loop as it is printed: one step per batch, the next batch waits for the previous ones."""
    for row, cores in enumerate(grid.cores):
        for batch in range(1, grid.latency_ms.shape[1] + 1):
            latency_ms, queued_ms, holds = float(grid.latency_ms[row, batch - 1]), 0.0, True
            for _ in range(0, count, batch):
                if latency_ms + network_ms_max + queued_ms >= slo_ms:
                    holds = False
                    break
                queued_ms += latency_ms
            if holds:
                return cores, batch
    return None


def per_batch_loop(grid: SpongeGrid, budgets_ms: Sequence[float]) -> tuple[float, int] | None:
    """The same with each batch's own tightest budget."""
    for row, cores in enumerate(grid.cores):
        for batch in range(1, grid.latency_ms.shape[1] + 1):
            done_ms, holds = 0.0, True
            for first in range(0, len(budgets_ms), batch):
                done_ms += float(grid.latency_ms[row, batch - 1])
                holds = holds and done_ms < budgets_ms[first]
            if holds:
                return cores, batch
    return None


def burst(grid: SpongeGrid, count: int, network_ms_max: float, slo_ms: float = SLO_MS) -> tuple[float, int] | None:
    found = sponge.cheapest(grid, sponge.holds_burst(grid, count, network_ms_max, slo_ms))
    return (found.cores, found.batch) if found else None


grids = st.integers(1, 5).flatmap(
    lambda batches: st.lists(
        st.lists(st.integers(1, 300), min_size=batches, max_size=batches), min_size=1, max_size=6
    ).map(lambda rows: SpongeGrid(tuple(float(c) for c in range(1, len(rows) + 1)), np.array(rows, dtype=np.float64)))
)
"""Whole milliseconds, so that sums are exact and equality counts as it is printed."""


@settings(max_examples=50)
@given(grids, st.integers(0, 30), st.integers(0, 1200), st.integers(1, 1200))
def test_closed_form_is_the_printed_loop(grid: SpongeGrid, count: int, way_ms: int, slo_ms: int) -> None:
    assert burst(grid, count, way_ms, slo_ms) == algorithm_2(grid, count, way_ms, slo_ms)


@pytest.mark.parametrize("latency_ms", [FITTED_WHOLE_MS, RESNET_T_MS, YOLO_MS], ids=["fit", "ResNet-T", "YOLOv5s-S"])
def test_closed_form_is_the_printed_loop_on_published_profiles(latency_ms: Callable[[int, float], float]) -> None:
    grid = grid_from(latency_ms)
    for count in (1, 5, 20, 33, 100):
        for way_ms in range(0, 1001, 25):
            assert burst(grid, count, way_ms) == algorithm_2(grid, count, way_ms, SLO_MS)


@settings(max_examples=50)
@given(grids, st.lists(st.integers(0, 1200), max_size=30))
def test_budgets_by_batch_are_the_loop_with_each_batch_s_own_budget(grid: SpongeGrid, budgets: list[int]) -> None:
    budgets_ms = np.sort(np.array(budgets, dtype=np.float64))
    found = sponge.cheapest(grid, sponge.holds_per_batch(grid, budgets_ms))
    assert ((found.cores, found.batch) if found else None) == per_batch_loop(grid, list(budgets_ms))


@settings(max_examples=50)
@given(grids, st.integers(1, 30), st.integers(0, 1000))
def test_one_budget_for_all_is_algorithm_2(grid: SpongeGrid, count: int, way_ms: int) -> None:
    budgets_ms = np.full(count, SLO_MS - way_ms)
    found = sponge.cheapest(grid, sponge.holds_per_batch(grid, budgets_ms))
    assert ((found.cores, found.batch) if found else None) == burst(grid, count, way_ms)


def test_cores_never_fall_when_it_gets_harder() -> None:
    grid = grid_from(YOLO_MS)

    def cores(count: int, way_ms: float, slo_ms: float) -> float:
        found = burst(grid, count, way_ms, slo_ms)
        return found[0] if found else math.inf

    for low, high in zip(range(0, 400, 7), range(7, 407, 7), strict=True):
        assert cores(20, low, SLO_MS) <= cores(20, high, SLO_MS)
        assert cores(20, 50, SLO_MS - low) <= cores(20, 50, SLO_MS - high)
        assert cores(low // 7, 50, SLO_MS) <= cores(high // 7, 50, SLO_MS)


def test_100_requests_at_once_need_5_cores_and_batches_of_10() -> None:
    found = sponge.cheapest(grid_from(FITTED_WHOLE_MS), sponge.holds_burst(grid_from(FITTED_WHOLE_MS), 100, 50, 1000))
    assert found is not None
    assert (found.cores, found.batch, math.floor(found.latency_ms)) == (5, 10, 91)


GOLDEN_RESNET_T = {
    0: (1, 2), 50: (1, 2), 100: (1, 4), 200: (1, 10), 300: (2, 2), 400: (2, 2), 500: (2, 4), 600: (3, 3),
    675: (3, 7), 700: (3, 10), 800: (5, 10), 900: (15, 10),
}  # fmt: skip
GOLDEN_FIT: dict[int, tuple[int, int] | None] = {
    0: (1, 2), 200: (1, 4), 400: (1, 10), 500: (2, 3), 600: (2, 4), 675: (2, 10), 700: (3, 4), 800: (5, 10), 900: None,
}  # fmt: skip
GOLDEN_FIT_MARGIN: dict[int, tuple[int, int] | None] = {
    300: (1, 10), 400: (2, 3), 600: (3, 4), 700: (5, 10), 800: None,
}  # fmt: skip


@pytest.mark.parametrize(("way_ms", "expected"), GOLDEN_RESNET_T.items())
def test_pairs_for_20_requests_on_resnet_t(way_ms: int, expected: tuple[int, int]) -> None:
    assert burst(grid_from(RESNET_T_MS), 20, way_ms) == expected


@pytest.mark.parametrize(("way_ms", "expected"), GOLDEN_FIT.items())
def test_pairs_for_20_requests_on_the_fit(way_ms: int, expected: tuple[int, int] | None) -> None:
    assert burst(grid_from(FITTED_WHOLE_MS), 20, way_ms) == expected


@pytest.mark.parametrize(("way_ms", "expected"), GOLDEN_FIT_MARGIN.items())
def test_pairs_with_a_margin_of_a_tenth(way_ms: int, expected: tuple[int, int] | None) -> None:
    assert burst(grid_from(FITTED_WHOLE_MS), 20, way_ms, 0.9 * SLO_MS) == expected


def test_table_of_the_motivation() -> None:
    """Batches per second are counted whole: b · ⌊1000/l⌋, and ⌈100 / that⌉ replicas serve 100 requests/s."""
    whole = [batch * (1000 // int(latency_ms)) for batch, _, latency_ms in RESNET_T_CELLS]
    assert whole == [18, 20, 40, 80, 108, 128]
    assert [-(-100 // rate) for rate in whole] == [6, 5, 3, 2, 1, 1]


def test_what_the_motivation_calls_feasible_is_so_when_arrivals_are_steady() -> None:
    """8 cores, batches of 4 in 37 ms, 600 ms on the way, 100 requests/s; a burst of 100 takes 25 × 37 ms."""
    grid = SpongeGrid((8.0,), np.array([[1e9, 1e9, 1e9, 37.0]]))
    holds = sponge.holds_steady(grid, 100.0, 600.0, SLO_MS) & sponge.keeps_up(grid, 100.0)
    assert holds[0, 3]
    assert not sponge.holds_burst(grid, 100, 600.0, SLO_MS).any()


def test_steady_without_arrivals_waits_for_nobody() -> None:
    grid = grid_from(YOLO_MS)
    found = sponge.cheapest(grid, sponge.holds_steady(grid, 0.0, 0.0, SLO_MS) & sponge.keeps_up(grid, 0.0))
    assert found is not None
    assert (found.cores, found.batch) == (1, 1)


def test_throughput_is_checked_where_the_budgets_alone_would_allow_less() -> None:
    grid = grid_from(YOLO_MS)
    holds = sponge.holds_burst(grid, 1, 0.0, SLO_MS) & sponge.keeps_up(grid, 20.0)
    found = sponge.cheapest(grid, holds)
    assert found is not None
    assert 1000 * found.batch / found.latency_ms >= 20


@settings(max_examples=50)
@given(grids, st.lists(st.integers(0, 1200), max_size=30), st.integers(0, 50))
def test_best_effort_serves_as_many_as_any_batch(grid: SpongeGrid, budgets: list[int], rate_rps: int) -> None:
    budgets_ms = np.sort(np.array(budgets, dtype=np.float64))

    def served(batch: int) -> int:
        done_ms, count = 0.0, 0
        for first in range(0, len(budgets), batch):
            taken = budgets_ms[first : first + batch]
            done_ms += float(grid.latency_ms[-1, len(taken) - 1])
            count += sum(1 for budget_ms in taken if done_ms <= budget_ms)
        return count

    setting, count = sponge.best_effort(grid, budgets_ms, rate_rps)
    assert setting.cores == grid.cores[-1]
    assert count == served(setting.batch) == max(served(b) for b in range(1, grid.latency_ms.shape[1] + 1))


def test_ties_go_to_the_batch_that_keeps_up() -> None:
    grid = SpongeGrid((1.0,), np.array([[50.0, 60.0, 70.0]]))  # 20, 33 and 43 requests/s
    setting, served = sponge.best_effort(grid, np.full(2, 1e6), 30.0)
    assert (setting.batch, served) == (2, 2)


def test_saturation_and_the_shortest_plan() -> None:
    grid = grid_from(YOLO_MS)
    assert sponge.max_rate_rps(grid) == pytest.approx(1000 * 16 / YOLO_MS(16, 16.0))


def test_requests_that_no_setting_starts_in_time() -> None:
    grid = SpongeGrid((1.0, 2.0), np.array([[50.0, 60.0, 70.0], [30.0, 40.0, 50.0]]))
    assert sponge.startable(grid, 100.0) == 6  # two batches of 3 on 2 cores, or three of 2
    assert sponge.startable(grid, 0.0) == 3


def infeasible(upload_ms: NDArray[np.float64], margin: float) -> NDArray[np.int64]:
    grid = grid_from(YOLO_MS)
    return np.flatnonzero([burst(grid, 20, way_ms, margin * SLO_MS) is None for way_ms in upload_ms])


@pytest.mark.parametrize(("margin", "from_ms"), [(1.0, 299), (0.95, 249), (0.9, 199)])
def test_the_least_upload_that_no_setting_bears(margin: float, from_ms: int) -> None:
    assert infeasible(np.arange(0.0, 700.0), margin)[0] == from_ms


def test_a_request_more_or_less_by_rounding() -> None:
    assert sponge.requests_in(20.0, 1.0) == 20
    assert sponge.requests_in(20.000000000001, 1.0) == 20
    assert sponge.requests_in(0.1 + 0.2, 10.0) == 3
    assert sponge.requests_in(20.1, 1.0) == 21
    assert sponge.requests_in(0.0, 1.0) == 0


def test_a_belief_s_costs_become_a_grid() -> None:
    grid = sponge.grid_of([(0, 2_000_000, 3_000_000, 4_000_000), (0, 1_500_000, 1_600_000, 9)], (0.5, 2), 2)
    assert list(grid.cores) == [0.5, 2]
    assert np.array_equal(grid.latency_ms, [[2.0, 3.0], [1.5, 1.6]])
    assert list(grid.throughput_rps[0]) == pytest.approx([500, 2000 / 3])


@pytest.fixture(name="sponge_data", scope="session")
def sponge_data_fixture() -> Path:
    """The folder of Sponge's public artefact; the test is skipped where it is missing."""
    shared = Path(os.environ.get("SLOOP_SHARED", Path(__file__).resolve().parents[4] / "shared"))
    folder = shared / "data" / "saeid93__sponge"
    if not folder.is_dir():
        pytest.skip("the data of Sponge's artefact is not here")
    return folder


def upload_ms(sponge_data: Path) -> NDArray[np.float64]:
    """284 KiB over the recorded 4G link, one value per second for ten minutes."""
    log = (sponge_data / "experiments" / "runner" / "notebooks" / "report_bus_0001.log").read_text().split("\n")[:600]
    rates = [int(line.split()[4]) // int(line.split()[5]) for line in log]
    return np.array([284 * 1024 / rate for rate in rates])


@pytest.mark.parametrize(("margin", "seconds"), [(1.0, 9), (0.95, 19), (0.9, 42)])
def test_seconds_of_the_recorded_network_that_no_setting_bears(sponge_data: Path, margin: float, seconds: int) -> None:
    assert len(infeasible(upload_ms(sponge_data), margin)) == seconds


def test_which_seconds_of_the_recorded_network_no_setting_bears(sponge_data: Path) -> None:
    uploads_ms = upload_ms(sponge_data)
    rows = infeasible(uploads_ms, 1.0)
    assert rows.tolist() == [122, 123, 137, 243, 356, 381, 387, 388, 390]
    grid = grid_from(YOLO_MS)
    batches = {sponge.best_effort(grid, np.full(20, SLO_MS - uploads_ms[row]), 20.0)[0].batch for row in rows}
    assert {batch for batch in batches if 20 % batch} == {3, 6, 9, 13}, "their last batch waits for company"
