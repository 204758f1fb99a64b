"""Plans for requests of several rows, and of rows of several sizes: in rows, and with what these take on average."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sloop.systems.mix import ONE_ROW_EACH, WorkMix
from sloop.systems.planning import explain_plan
from sloop.systems.planning.report import PlanReport
from sloop.systems.setup import Setup, mixes_of
from sloop.vocabulary import Slot
from sloop.workload import Work
from tests.systems.planning.scene import READING, profile, setup, stage

WORKS = st.lists(st.builds(Work, st.integers(1, 50), st.integers(1, 600)), min_size=1, max_size=40)


def latency(each_ms: float) -> dict[str, float | str]:
    return {"form": "quadratic", "alpha": 0.0, "beta": each_ms, "gamma": 5.0}


SIZED = profile(12.8, 5, batch=8) | {
    "max_cores": 1,
    "sizes": [{"size": 8, "latency_ms": latency(0.8)}, {"size": 512, "latency_ms": latency(51.2)}],
}
"""A batch of n rows takes 5 + 0.1 × n × size ms."""
BOUNDS = [8, 64, 512]


def encoder(slo_ms: float = 200, **options: Any) -> Setup:
    declared = {**stage("encode", profile=SIZED), "sizes": BOUNDS, **options}
    return setup(declared, slo_ms=slo_ms, system={"name": "mixed"})


def planned(made: Setup, rate: float, works: list[Work] | None = None) -> PlanReport:
    mixes: Mapping[str, WorkMix] = {made.application.name: WorkMix.of(works or [])}
    return explain_plan(made, rate, mixes=mixes)


@given(WORKS)
def test_a_mix_is_the_mean_over_rows(works: list[Work]) -> None:
    mix, rows = WorkMix.of(works), sum(work.rows for work in works)
    assert mix.rows == pytest.approx(rows / len(works))
    assert sum(mix.sizes.values()) == pytest.approx(1)
    assert [*mix.sizes] == sorted({work.size for work in works})
    mean = sum(work.rows * work.size for work in works) / rows
    assert sum(size * share for size, share in mix.sizes.items()) == pytest.approx(mean)


def test_ordinary_requests_change_nothing() -> None:
    assert WorkMix.of([]) == ONE_ROW_EACH == WorkMix.of([Work()] * 3)
    without = explain_plan(encoder(), 40)
    assert planned(encoder(), 40).stages == without.stages
    assert planned(encoder(), 40).notes == without.notes


def test_a_belief_is_that_of_the_mean_of_the_rows() -> None:
    """9 of 10 rows are up to 8 and take 5.8 ms alone, the tenth 56.2; 4 rows 8.2 and 209.8."""
    made = encoder()
    WorkMix.of([Work(9, 7), Work(1, 500)]).teach(made.beliefs["encode", "encode", "custom"])
    belief = made.beliefs["encode", "encode", "custom"]
    assert belief.latency_ms(1, Slot(1, "custom")) == pytest.approx(0.9 * 5.8 + 0.1 * 56.2)
    assert belief.latency_ms(4, Slot(1, "custom")) == pytest.approx(0.9 * 8.2 + 0.1 * 209.8)


def test_as_many_rows_need_the_same_replicas_whoever_brings_them() -> None:
    single, several = planned(encoder(), 80), planned(encoder(), 20, [Work(4)])
    assert [row.replicas for row in several.stages] == [row.replicas for row in single.stages]
    assert several.stages[0].rate_rps == single.stages[0].rate_rps == 80
    assert several.stages[0].batch_expected == 4, "the rows of a request arrive together"
    assert any("a request brings 4 rows on average" in note and "80 rows/s" in note for note in several.notes)


def test_larger_rows_need_more_replicas() -> None:
    cores = [planned(encoder(), 40, [Work(1, size)]).cores for size in (8, 64, 512)]
    assert cores == sorted(cores)
    assert cores[0] < cores[-1]
    mixed = planned(encoder(), 40, [Work(1, 8), Work(1, 512)])
    assert cores[0] < mixed.cores <= cores[-1]
    assert any("the mean of rows of size 8 to 512: one row takes 31 ms" in note for note in mixed.notes)


@pytest.mark.parametrize(
    ("works", "options", "note"),
    [
        ([Work(1, 8), Work(1, 512)], {"slo_ms": 50.0}, "rows of size 512 take longer than the deadline"),
        ([Work(1, 1_000)], {}, "size 1000 is beyond the profile's largest, 512"),
        ([Work(1, 64)], {"profile": profile(12.8, 5)}, "as if all rows were typical"),
        (
            [Work(1, 64)],
            {"profile": profile(12.8, 5) | {"sizes": [{"size": 128, "latency_ms": latency(12.8)}]}},
            "knows only size 128; others are taken to cost in proportion",
        ),
    ],
)
def test_what_a_mean_leaves_out_is_said(works: list[Work], options: dict[str, Any], note: str) -> None:
    report = planned(encoder(**options), 10, works)
    assert any(note in each for each in report.notes), report.notes


def test_later_stages_have_the_rows_and_parts_one_each() -> None:
    made = setup(*READING)
    found = mixes_of(made.application, WorkMix(3.0, {8: 1.0}))
    assert found["detect"] == WorkMix(3.0, {8: 1.0})
    assert found["digits"] == WorkMix(3.0)
    assert "read" not in found, "it runs for each part"
