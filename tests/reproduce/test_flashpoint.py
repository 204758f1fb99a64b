"""Flashpoint's windows and Atoll's targets (section 7.5, checks 12 and 26), its averages (17), rows that follow."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import pytest

from sloop.profile.published import FLASHPOINT_MODELS, H2H_MBPS
from sloop.reproduce import data_folder, reproduce
from sloop.reproduce.flashpoint import offline, published
from sloop.reproduce.flashpoint.traces import AZURE, HOURS, MAIN, generated_counts, requests_of
from sloop.reproduce.rows import Row
from sloop.solvers.flashpoint import PieceCosts

DATA = data_folder()
needs_trace = pytest.mark.skipif(
    not requests_of(HOURS[0], DATA).is_measured, reason="the Twitter trace is not in the folder of public data"
)


# Traces


@needs_trace
@pytest.mark.parametrize(
    ("name", "middle", "peak", "requests"),
    [
        ("470042", 57, 267, 250_885),
        ("1652593", 57, 267, 210_767),
        ("470470", 57, 267, 233_276),
        ("10800", 58, 273, 259_624),
    ],
)
def test_the_windows_have_the_printed_statistics(name: str, middle: int, peak: int, requests: int) -> None:
    counts = requests_of(name, DATA).counts
    assert (len(counts), median(counts), max(counts), sum(counts)) == (3600, middle, peak, requests)


@needs_trace
def test_the_window_of_ten_hours() -> None:
    counts = requests_of("10h", DATA).counts
    assert (len(counts), median(counts), max(counts)) == (36_000, 47, 291)


@pytest.mark.parametrize("seed", range(3))
def test_the_generated_hour_has_the_statistics_of_azure(seed: int) -> None:
    found = requests_of(AZURE, DATA, seed=seed)
    assert not found.is_measured
    assert median(found.counts) == 18
    assert max(found.counts) / 18 == pytest.approx(2.54, rel=0.01)
    assert (
        list(found.counts)
        == list(requests_of(AZURE, None, seed=seed).counts)
        != list(generated_counts("x", 3600, 18, 2.54))
    )


def test_without_the_file_an_hour_is_made_up() -> None:
    found = requests_of(MAIN, None)
    assert not found.is_measured
    assert (len(found.counts), median(found.counts)) == (3600, 57)
    assert max(found.counts) / 57 == pytest.approx(4.68, rel=0.01)


def test_fifteen_percent_of_an_hour() -> None:
    assert median(count * 0.15 for count in requests_of(MAIN, DATA).counts) == pytest.approx(8.55, abs=0.5)


# Atoll's policy


@needs_trace
@pytest.mark.parametrize("name", HOURS)
def test_the_targets_of_atoll_s_policy(name: str) -> None:
    targets = offline.atoll_targets(requests_of(name, DATA).counts)
    assert len(targets) == 240, "the first minute, and t = 15, 30, …, 3585"
    steps = [more for _, more in offline.growth_of(targets)]
    assert (targets[0], max(targets), len(steps), sum(steps), max(steps)) == offline.ATOLL[name]


@needs_trace
def test_scale_ups_are_a_seventh_of_what_runs() -> None:
    """Section 6, item 12: 0.14 to 0.16 on average, at most one of 27 to 31 above 1."""
    for name in HOURS:
        growth = offline.growth_of(offline.atoll_targets(requests_of(name, DATA).counts))
        ratios = [more / before for before, more in growth]
        assert 0.13 < sum(ratios) / len(ratios) < 0.165
        assert sum(ratio > 1 for ratio in ratios) <= 1


# Averages


def test_the_printed_table_gives_the_headline() -> None:
    found = [(published.mean_saved(ratios), published.mean_of_percents(ratios)) for ratios in map(column, range(4))]
    assert [saved for saved, _ in found] == pytest.approx([14.54, 20.63, 56.23, 75.42], abs=0.01)
    assert [plain for _, plain in found] == pytest.approx([14.01, 19.31, 44.97, 51.36], abs=0.01)


def column(place: int) -> dict[str, list[float]]:
    return {name: [published.ratio_of(row[place])] for name, row in published.SAVED_PERCENT.items()}


def test_averages_are_taken_over_policies_first() -> None:
    assert published.mean_saved({"a": [1.0, 3.0], "b": [2.0] * 7}) == pytest.approx(50)
    assert published.mean_of_percents({"a": [1.0, 1.0], "b": [4.0]}) == pytest.approx(37.5)
    assert published.saved_percent(published.ratio_of(12.5)) == pytest.approx(12.5)


# Rows


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, str], Row]:
    found = reproduce("flashpoint", quick=True, data=DATA).rows
    assert len({(row.experiment, row.metric) for row in found}) == len(found)
    return {(row.experiment, row.metric): row for row in found}


def test_contradictions_of_the_source_are_found(rows: dict[tuple[str, str], Row]) -> None:
    far = rows["E10 sources", "cold start from another host"]
    assert (far.verdict, far.paper) == ("source-inconsistent", 232.2)
    assert far.ours == pytest.approx(402.6, abs=0.1)
    mean = rows["E5 pieces", "the same, arithmetic mean of six models"]
    assert (mean.verdict, mean.paper) == ("source-inconsistent", 7.1)


def test_t5_in_pieces(rows: dict[tuple[str, str], Row]) -> None:
    row = rows["E5 pieces", "cold start of T5, whole / in pieces"]
    assert row.verdict == "reproduced"
    assert row.ours == pytest.approx(11_406.35 / 268.45, rel=1e-3), "the largest of its layers"


def test_plans_are_never_worse_than_those_they_are_compared_with() -> None:
    for name in FLASHPOINT_MODELS:
        for requests in offline.QUEUES:
            found = offline.benefits(name, requests)
            assert found.best >= max(found.gillis, found.serfer, 0.0) - 1e-12
            assert found.ours.pieces <= len(FLASHPOINT_MODELS[name].layers)


def test_costs_of_pieces_are_those_of_the_model() -> None:
    for name, model in FLASHPOINT_MODELS.items():
        costs: PieceCosts = offline.piece_costs(name)
        assert sum(costs.cold_s) == pytest.approx(sum(offline.stages_s(name, H2H_MBPS)))
        assert costs.exec_whole_s == pytest.approx(model.exec_ms.value / 1e3)
    assert offline.piece_costs(offline.T5).plan(range(1, 55)).request_s == pytest.approx(0.1406 * 1.4394, rel=1e-4)


def test_plain_transfers_share_the_source_and_a_chain_does_not() -> None:
    alone = offline.transfer_s(1, is_chain=False)
    assert alone == pytest.approx(11_408 * 8 / offline.TEN_GBIT_MBPS, rel=1e-6)
    assert [offline.transfer_s(k, is_chain=False) for k in (2, 3)] == pytest.approx([2 * alone, 3 * alone])
    assert [offline.transfer_s(k, is_chain=True) for k in (2, 4)] == pytest.approx([alone, alone])


def test_without_the_trace_its_rows_are_left_out(tmp_path: Path) -> None:
    found = reproduce("flashpoint", quick=True, data=tmp_path)
    experiments: Sequence[str] = [row.experiment for row in found.rows]
    assert "Atoll's targets" not in experiments
    assert "E6 plans" in experiments
    assert sum(line.startswith("requests: assumed") for line in found.assumed) == 2
    assert [figure.name for figure in found.figures] == ["targets", "plans"]
