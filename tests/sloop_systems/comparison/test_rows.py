"""Verdicts follow from numbers, by one rule, and each row says which results would be off."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from scipy.stats import t as student

from sloop_systems.comparison.rows import (
    STUDENT,
    TOLERANCES,
    VERDICTS,
    Claim,
    Judged,
    Known,
    ResultLimits,
    Row,
    as_table,
    bounded,
    compare,
    contradicted,
    difference,
    directed,
    minus,
    outside,
    over,
    summary,
    with_note,
)

CLAIM = Claim("E", "m", "%", paper=5.0, note="as printed")
OURS = structs.replace(CLAIM, paper=None)
EXACT = structs.replace(CLAIM, known="exact")


@pytest.mark.parametrize(
    ("figure", "unit", "known", "tolerance"),
    [
        (31, "ms", "exact", 0.5),
        (3.0, "%", "exact", 0.05),
        (0.969, "", "exact", 0.0005),
        (-1.121086, "", "exact", 0.0000005),
        (5e-05, "s", "exact", 0.000005),
        (10.0, "cores", "simulated", 1.0),
        (0.5, "cores", "simulated", 0.1),
        (0.5, "s", "simulated", 0.05),
        (0.35, "%", "simulated", 0.1),
        (12.0, "%", "simulated", 1.2),
        (30.0, "%", "simulated", 2.0),
        (89.0, "%", "simulated", 1.1),
        (99.55, "%", "simulated", 0.1),
        (140.0, "%", "simulated", 2.0),
        (89.0, "points", "simulated", 2.0),
        (4.0, "cores", "plot", 1.0),
        (4.0, "MB/s", "plot", 0.6),
        (100.0, "cores", "plot", 15.0),
        (43.9, "%", "plot", 3.0),
        (0.0, "points", "plot", 0.3),
        (15.0, "×", "text", 3.0),
        (1.3, "×", "text", 0.26),
        (48.0, "%", "text", 5.0),
    ],
)
def test_a_tolerance_depends_on_the_kind_of_figure_only(
    figure: float, unit: str, known: Known, tolerance: float
) -> None:
    claim = Claim("E", "m", unit, known=known, paper=figure)
    assert claim.tolerance() == pytest.approx(tolerance)
    assert claim.tolerance(tolerance / 2) == pytest.approx(tolerance / 2)
    assert claim.tolerance(tolerance * 2) == pytest.approx(tolerance), "a row may ask for less, not for more"


def test_zeros_at_the_end_of_a_printed_figure_are_digits() -> None:
    printed = Claim("E", "m", "%", "exact", 346.00, places=2)
    assert compare(printed, [346.004]).verdict == "reproduced"
    assert compare(printed, [346.04]).verdict == "off"
    assert compare(structs.replace(printed, places=None), [346.04]).verdict == "reproduced"


def test_a_mean_of_runs_that_agree() -> None:
    assert compare(CLAIM, [4.9, 5.3, 5.0]).verdict == "reproduced"
    assert compare(CLAIM, [6.0, 6.1, 6.0]).verdict == "off"
    assert compare(CLAIM, [6.0, 6.1, 6.0], similar=True).verdict == "shape"
    row = compare(CLAIM, [4.5, 5.0, 5.2], within=0.2)
    assert row.ours == pytest.approx(4.9)
    assert (row.low, row.high, row.paper) == (4.5, 5.2, 5.0)
    assert row.note.startswith("mean of a simulation, within 0.2; ")
    assert row.note.endswith("; as printed")


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "reproduced"),
        ({"derived": 2.0}, "reproduced"),
        ({"paper": None, "derived": 5.0}, "derived"),
        ({"fitted": "the speed"}, "fitted"),
        ({"paper": None, "derived": 5.0, "itself": True}, "self"),
    ],
)
def test_equal_to_what(changes: dict[str, object], verdict: str) -> None:
    claim = structs.replace(CLAIM, **changes)
    row = compare(claim, [5.0] * 3)
    assert row.verdict == verdict
    assert ("fitted: the speed" in row.note) == ("fitted" in changes)
    assert compare(claim, [9.0] * 3).verdict == "off", "what was fitted, or is our own, can be off"


def test_a_bound_of_fitted_parameters_is_fitted() -> None:
    assert bounded(structs.replace(CLAIM, fitted="the speed"), [4.0] * 3, at_most=5).verdict == "fitted"
    assert bounded(structs.replace(CLAIM, fitted="the speed"), [6.0] * 3, at_most=5).verdict == "off"


def test_a_percentage_near_100_is_judged_on_what_is_missing() -> None:
    in_time = Claim("E", "in time", "%", paper=99.55)
    late = Claim("E", "late", "%", paper=0.45)
    for claim, sign in ((in_time, -1), (late, 1)):
        assert compare(claim, [claim.figure + sign * 0.09] * 3).verdict == "reproduced"
        assert compare(claim, [claim.figure + sign * 0.3] * 3, similar=True).verdict == "shape"
        assert compare(claim, [claim.figure + sign * 2.0] * 3, similar=True).verdict == "off"
    assert compare(Claim("E", "in time", "%", paper=99.95), [100.0] * 3).verdict == "within-bound"


def test_a_figure_below_its_tolerance_is_only_a_bound() -> None:
    claim = Claim(experiment="E", metric="m", unit="%", derived=0.06)
    row = compare(claim, [0.0, 0.0, 0.0])
    assert row.verdict == "within-bound"
    assert row.note == "mean of a simulation, within 0.1; cannot be distinguished from 0"
    assert compare(claim, [0.2] * 3).verdict == "off"


def test_a_magnitude_is_a_factor_of_two() -> None:
    claim = Claim("E5", "largest", "%", known="text", paper=48, computed=True)
    assert compare(claim, [27.3], similar=True).verdict == "shape"
    assert compare(claim, [27.3]).verdict == "off"
    assert compare(claim, [23.9], similar=True).verdict == "off"
    assert compare(claim, [74.1], similar=True).verdict == "off", "26 are not half of the 52 that 48 leave"
    assert compare(structs.replace(claim, unit="×"), [74.1], similar=True).verdict == "shape"
    assert compare(structs.replace(claim, paper=-48.0), [-27.3], similar=True).verdict == "shape"
    assert compare(structs.replace(claim, paper=-48.0), [27.3], similar=True).verdict == "off"
    assert compare(structs.replace(claim, paper=0.0), [0.9], similar=True).verdict == "off"


def test_an_order_is_a_limit_that_another_result_sets() -> None:
    faster = ResultLimits(below=8.0)
    assert compare(CLAIM, [6.0, 6.1, 6.0], shape=faster).verdict == "shape"
    assert compare(CLAIM, [8.0] * 3, shape=faster).verdict == "off"
    row = compare(CLAIM, [7.0, 7.9, 8.1], shape=structs.replace(faster, of="every run"))
    assert row.verdict == "off"
    assert "expected: below 8 in every run" in row.note
    assert (row.least, row.most) == (None, 8.0)


def test_samples_that_enclose_a_figure_do_not_make_it_reproduced() -> None:
    row = compare(CLAIM, [1.0, 9.0, 5.0])
    assert row.verdict == "shape"
    assert "the mean of 3 runs has a standard error of 2.309" in row.note


@pytest.mark.parametrize("samples", [[5.0], [5.0, 5.0]])
def test_too_few_runs_are_a_shape_at_most(samples: list[float]) -> None:
    assert compare(CLAIM, samples).verdict == "shape"
    assert bounded(OURS, samples, at_most=6).verdict == "shape"
    assert "run" in compare(CLAIM, samples).note
    assert compare(CLAIM, [5.9]).verdict == "off"
    assert compare(CLAIM, [5.9], similar=True).verdict == "shape"


def test_what_is_computed_needs_no_second_run() -> None:
    assert compare(structs.replace(CLAIM, computed=True), [5.1]).verdict == "reproduced"
    assert compare(EXACT, [5.04]).verdict == "reproduced"
    assert compare(EXACT, [5.06]).verdict == "off"
    assert bounded(structs.replace(OURS, computed=True), [5.1], at_most=6).verdict == "within-bound"


def test_a_mean_of_many_runs_may_come_as_one_sample_with_its_error() -> None:
    assert compare(CLAIM, [5.1], runs=3, error=0.2).verdict == "reproduced"
    assert compare(CLAIM, [5.1], runs=3, error=0.3).verdict == "shape"
    with pytest.raises(AssertionError, match="standard error"):
        compare(CLAIM, [5.1], runs=3)


def test_an_inequality_holds_in_every_run_or_says_mean() -> None:
    claim = structs.replace(OURS, note="")
    for samples, verdict, mean in (
        ([1.0, 2.0, 1.0], "within-bound", "within-bound"),
        ([1.0, 2.1, 1.0], "off", "within-bound"),
    ):
        each, whole = bounded(claim, samples, at_most=2.0), bounded(claim, samples, at_most=2.0, mean=True)
        assert (each.verdict, whole.verdict) == (verdict, mean)
        assert each.note == "our bound in every run: at most 2"
        assert whole.note == "our bound of the mean of 3 runs: at most 2"
    assert bounded(claim, [2.1], at_most=2.0, runs=5, shape=ResultLimits(below=3)).verdict == "shape"
    assert bounded(claim, [1.9], at_most=2.0, runs=5).note == "our bound of the mean of 5 runs: at most 2"
    published = bounded(CLAIM, [1.0, 2.1, 1.0], at_least=0.5, at_most=5)
    assert published.note == "published bound in every run: at least 0.5 and at most 5; as printed"


def test_our_own_limit_is_not_a_published_one() -> None:
    with pytest.raises(AssertionError, match="not the published bound"):
        bounded(CLAIM, [1.0] * 3, at_most=3)


def test_a_direction_is_never_more_than_a_shape() -> None:
    assert directed(OURS, [1.0], "rises", above=0).verdict == "shape"
    assert directed(OURS, [0.0], "rises", above=0).verdict == "off"
    assert directed(OURS, [0.0], at_least=0).verdict == "shape"
    assert directed(OURS, [-1.0, 2.0], above=0).verdict == "shape"
    assert directed(OURS, [-1.0, 2.0], above=0, of="every run").verdict == "off"
    assert directed(OURS, [1.0], "rises", above=0).note == "expected: rises, above 0; as printed"


@pytest.mark.parametrize(
    ("samples", "of", "verdict"),
    [
        ([1.0, 1.1, 0.9], "interval", "shape"),
        ([1.0, 2.1, -0.9], "interval", "off"),
        ([-1.0, 0.9, -0.5], "doubt", "shape"),
        ([-1.0, -1.1, -0.9], "doubt", "off"),
        ([1.0], "interval", "shape"),
        ([-1.0], "doubt", "off"),
    ],
)
def test_an_interval_decides_or_leaves_open(samples: list[float], of: Judged, verdict: str) -> None:
    row = directed(OURS, samples, above=0, of=of)
    assert row.verdict == verdict
    assert ("95 % interval" in row.note, "says nothing about the scatter" in row.note)[len(samples) == 1]


def test_a_row_that_no_result_fails_is_refused() -> None:
    with pytest.raises(ValueError, match="a result that fails it"):
        directed(OURS, [1.0])
    for unit in ("×", "of 12"):
        with pytest.raises(ValueError, match=f"no result in {unit} can fail it"):
            directed(structs.replace(OURS, unit=unit), [1.0], at_least=0)
    with pytest.raises(ValueError, match="no result in of 12 can fail it"):
        bounded(structs.replace(OURS, unit="of 12"), [1.0], at_most=12)
    assert directed(structs.replace(OURS, unit="of 12"), [3.0], at_least=12).verdict == "off"


MAKERS: tuple[Callable[[list[float]], Row], ...] = (
    lambda samples: compare(CLAIM, samples),
    lambda samples: compare(CLAIM, samples, similar=True),
    lambda samples: compare(CLAIM, samples, shape=ResultLimits(above=2)),
    lambda samples: compare(EXACT, samples),
    lambda samples: bounded(OURS, samples, at_most=4),
    lambda samples: bounded(OURS, samples, at_least=4, at_most=6, mean=True, shape=ResultLimits(below=8)),
    lambda samples: directed(OURS, samples, below=0),
    lambda samples: directed(OURS, samples, above=0, of="interval"),
    lambda samples: contradicted(EXACT, samples, other=1.0, why="of"),
    lambda samples: outside(CLAIM, samples, at_most=4, why="of"),
)


@pytest.mark.parametrize("make", MAKERS)
@given(st.floats(-20, 20), st.lists(st.floats(-1, 1), min_size=3, max_size=5))
def test_outside_of_its_limits_a_row_is_off(
    make: Callable[[list[float]], Row], middle: float, noise: list[float]
) -> None:
    row = make([middle + each for each in noise])
    beyond = (row.least is not None and row.ours < row.least - 1e-6) or (
        row.most is not None and row.ours > row.most + 1e-6
    )
    assert not beyond or row.verdict == "off"
    assert row.least is not None or row.most is not None


def test_a_source_that_contradicts_itself() -> None:
    assert contradicted(EXACT, [1.0], other=1.0, why="by its table").verdict == "source-inconsistent"
    assert contradicted(EXACT, [5.0], other=1.0, why="by its table").verdict == "reproduced"
    row = contradicted(EXACT, [3.0], other=1.0, why="by its table")
    assert (row.verdict, row.note) == ("off", "the source says 1, too: by its table; as printed")


def test_tables_and_summaries() -> None:
    rows = [compare(CLAIM, [5.0] * 3), compare(CLAIM, [9.0] * 3)]
    assert summary(rows) == "2 rows: 1 reproduced, 1 off"
    assert as_table(rows, "E").rows[1][:7] == ("m", "%", 5.0, None, 9.0, 9.0, 9.0)
    assert all(row.note.endswith("; on a stand-in") for row in with_note(rows, "on a stand-in"))
    assert len(VERDICTS) == 8
    assert TOLERANCES.keys() == {"simulated", "plot", "text"}


def test_a_figure_that_its_source_excludes() -> None:
    claim = Claim("E", "m", "×", paper=7.1)
    row = outside(claim, [13.5], at_least=8.2, why="one of six alone is 44.1")
    assert row.verdict == "source-inconsistent"
    assert row.note == "the source's own figures allow at least 8.2: one of six alone is 44.1"
    assert outside(claim, [8.0], at_least=8.2, why="").verdict == "off"
    assert outside(claim, [0.1], at_most=0.67, why="").verdict == "source-inconsistent"
    with pytest.raises(AssertionError, match="within the bounds"):
        outside(claim, [8.0], at_least=7.0, why="")


def test_differences_and_ratios_are_paired() -> None:
    assert minus([3.0, 5.0], [1.0, 2.0]) == [2.0, 3.0]
    assert over([3.0, 5.0], [1.0, 2.0]) == [3.0, 2.5]
    found = difference([3.0, 5.0, 4.0], [1.0, 2.0, 2.0])
    assert found.mean == pytest.approx(7 / 3)
    assert difference([3.0], [1.0]).half is None


def test_quantiles_of_students_t() -> None:
    expected = [student.ppf(0.975, freedom) for freedom in range(1, len(STUDENT) + 1)]
    assert pytest.approx(expected, abs=1e-4) == list(STUDENT)
