"""Verdicts follow from numbers, by one rule."""

import pytest
from msgspec import structs
from scipy.stats import t as student

from sloop_systems.comparison.rows import (
    STUDENT,
    TOLERANCES,
    VERDICTS,
    Claim,
    Known,
    as_table,
    bounded,
    compare,
    contradicted,
    directed,
    outside,
    similar,
    summary,
    with_note,
)

CLAIM = Claim("E", "m", "%", paper=5.0, note="as printed")


@pytest.mark.parametrize(
    ("figure", "unit", "known", "tolerance"),
    [
        (31, "ms", "exact", 0.5),
        (3.0, "%", "exact", 0.05),
        (0.969, "", "exact", 0.0005),
        (-1.121086, "", "exact", 0.0000005),
        (10.0, "cores", "simulated", 1.0),
        (0.5, "cores", "simulated", 0.1),
        (0.35, "%", "simulated", 0.1),
        (12.0, "%", "simulated", 1.2),
        (89.0, "%", "simulated", 2.0),
        (4.0, "cores", "plot", 1.0),
        (100.0, "cores", "plot", 15.0),
        (43.9, "%", "plot", 3.0),
        (0.0, "points", "plot", 0.3),
        (15.0, "×", "text", 3.0),
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


def test_a_mean_of_runs_that_agree() -> None:
    assert compare(CLAIM, [4.9, 5.3, 5.0]).verdict == "reproduced"
    assert compare(CLAIM, [6.0, 6.1, 6.0]).verdict == "off"
    assert compare(CLAIM, [6.0, 6.1, 6.0], shape=True).verdict == "shape"
    row = compare(CLAIM, [4.5, 5.0, 5.2], within=0.2)
    assert row.ours == pytest.approx(4.9)
    assert (row.low, row.high, row.paper) == (4.5, 5.2, 5.0)
    assert row.note.startswith("mean of a simulation, within 0.2; ")
    assert row.note.endswith("; as printed")


def test_a_figure_below_its_tolerance_is_only_a_bound() -> None:
    claim = Claim(experiment="E", metric="m", unit="%", derived=0.06)
    row = compare(claim, [0.0, 0.0, 0.0])
    assert row.verdict == "within-bound"
    assert row.note == "mean of a simulation, within 0.1, so that it cannot be distinguished from 0"
    assert compare(claim, [0.2] * 3).verdict == "off"


def test_27_does_not_pass_for_48() -> None:
    claim = Claim("E5", "largest", "%", known="text", paper=48, computed=True)
    assert compare(claim, [27.3], shape=True).verdict == "shape"
    assert compare(claim, [27.3]).verdict == "off"


def test_samples_that_enclose_a_figure_do_not_make_it_reproduced() -> None:
    row = compare(CLAIM, [1.0, 9.0, 5.0])
    assert row.verdict == "shape"
    assert "the mean of 3 runs has a standard error of 2.309" in row.note


@pytest.mark.parametrize("samples", [[5.0], [5.0, 5.0]])
def test_too_few_runs_are_a_shape_at_most(samples: list[float]) -> None:
    assert compare(CLAIM, samples).verdict == "shape"
    assert bounded(CLAIM, samples, at_most=6).verdict == "shape"
    assert "run" in compare(CLAIM, samples).note
    assert compare(CLAIM, [5.9]).verdict == "shape", "within twice the tolerance, which one run cannot decide"
    assert compare(CLAIM, [7.0]).verdict == "off"
    assert compare(CLAIM, [7.0], shape=True).verdict == "shape"


def test_what_is_computed_needs_no_second_run() -> None:
    assert compare(structs.replace(CLAIM, computed=True), [5.1]).verdict == "reproduced"
    assert compare(structs.replace(CLAIM, known="exact"), [5.04]).verdict == "reproduced"
    assert compare(structs.replace(CLAIM, known="exact"), [5.06]).verdict == "off"
    assert bounded(structs.replace(CLAIM, computed=True), [5.1], at_most=6).verdict == "within-bound"


def test_a_mean_of_many_runs_may_come_as_one_sample() -> None:
    assert compare(CLAIM, [5.1], runs=3).verdict == "reproduced"
    assert compare(CLAIM, [5.1], runs=3, error=0.2).verdict == "reproduced"
    assert compare(CLAIM, [5.1], runs=3, error=0.3).verdict == "shape"
    assert bounded(CLAIM, [5.1], at_most=6, runs=3).verdict == "within-bound"


def test_what_was_printed_goes_before_what_was_derived() -> None:
    both = Claim("E", "m", "%", paper=5.0, derived=2.0)
    assert compare(both, [2.0] * 3).verdict == "off"
    assert compare(structs.replace(both, paper=None), [2.0] * 3).verdict == "reproduced"


def test_an_inequality_holds_in_every_run_or_not_at_all() -> None:
    assert bounded(CLAIM, [1.0, 2.0, 1.0], at_most=2.0).verdict == "within-bound"
    assert bounded(CLAIM, [1.0, 2.1, 1.0], at_most=2.0).verdict == "off"
    assert bounded(CLAIM, [1.0, 2.1, 1.0], at_most=2.0, shape=True).verdict == "shape"
    row = bounded(CLAIM, [1.0, 2.1, 1.0], at_least=0.5, at_most=3)
    assert (row.verdict, row.note) == ("within-bound", "published bound: at least 0.5 and at most 3; as printed")
    ours = bounded(structs.replace(CLAIM, paper=None, note=""), [1.0] * 3, at_most=3)
    assert ours.note == "our bound: at most 3"


def test_a_direction_is_never_more_than_a_shape() -> None:
    assert directed(CLAIM, [1.0], holds=True, expect="rises").verdict == "shape"
    assert directed(CLAIM, [1.0], holds=False, expect="rises").verdict == "off"


def test_a_magnitude_is_a_factor_of_two() -> None:
    assert similar(4.0, [2.0, 2.0])
    assert similar(4.0, [8.0])
    assert not similar(4.0, [8.1])
    assert not similar(4.0, [1.9])


def test_a_source_that_contradicts_itself() -> None:
    exact = structs.replace(CLAIM, known="exact")
    assert contradicted(exact, [1.0], other=1.0).verdict == "source-inconsistent"
    assert contradicted(exact, [5.0], other=1.0).verdict == "reproduced"
    assert contradicted(exact, [3.0], other=1.0).verdict == "off"
    open_constant = contradicted(exact, [1.0], other=1.0, by="with passes of 400 ns it is")
    assert open_constant.note.startswith("with passes of 400 ns it is 1")


def test_tables_and_summaries() -> None:
    rows = [compare(CLAIM, [5.0] * 3), compare(CLAIM, [9.0] * 3)]
    assert summary(rows) == "2 rows: 1 reproduced, 1 off"
    assert as_table(rows, "E").rows[1][:7] == ("m", "%", 5.0, None, 9.0, 9.0, 9.0)
    assert all(row.note.endswith("; on a stand-in") for row in with_note(rows, "on a stand-in"))
    assert set(VERDICTS) == {"reproduced", "within-bound", "shape", "off", "source-inconsistent"}
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


def test_quantiles_of_students_t() -> None:
    expected = [student.ppf(0.975, freedom) for freedom in range(1, len(STUDENT) + 1)]
    assert pytest.approx(expected, abs=1e-4) == list(STUDENT)
