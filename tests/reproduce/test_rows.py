"""Verdicts follow from numbers."""

from sloop.reproduce.rows import Claim, as_table, bounded, contradicted, equals, shaped, tally

CLAIM = Claim(experiment="E", metric="m", unit="%", paper=5.0, note="as printed")


def test_a_number() -> None:
    assert equals(CLAIM, [4.9, 5.3], within=0.2).verdict == "reproduced"
    assert equals(CLAIM, [4.0, 6.1], within=0.01).verdict == "reproduced"  # encloses it
    assert equals(CLAIM, [6.0, 6.1], within=0.5).verdict == "off"
    assert equals(CLAIM, [6.0, 6.1], within=0.5, shape=True).verdict == "shape"
    assert equals(CLAIM, [5.2], within=0.2).verdict == "reproduced"
    row = equals(CLAIM, [4.0, 5.0], within=1)
    assert (row.ours, row.low, row.high, row.paper, row.note) == (4.5, 4.0, 5.0, 5.0, "within 1; as printed")


def test_what_was_printed_goes_before_what_was_derived() -> None:
    both = Claim(experiment="E", metric="m", unit="%", paper=5.0, derived=2.0)
    assert equals(both, [2.0], within=0.1).verdict == "off"
    assert equals(Claim(experiment="E", metric="m", unit="%", derived=2.0), [2.0], within=0.1).verdict == "reproduced"


def test_an_inequality_holds_for_every_sample() -> None:
    assert bounded(CLAIM, [1.0, 2.0], at_most=2.0).verdict == "reproduced"
    assert bounded(CLAIM, [1.0, 2.1], at_most=2.0).verdict == "off"
    assert bounded(CLAIM, [1.0, 2.1], at_most=2.0, shape=True).verdict == "shape"
    row = bounded(CLAIM, [1.0, 2.1], at_least=0.5, at_most=3)
    assert (row.verdict, row.note) == ("reproduced", "at least 0.5 and at most 3; as printed")


def test_a_shape_is_never_more_than_a_shape() -> None:
    assert shaped(CLAIM, [1.0], shape=True, expect="rises").verdict == "shape"
    assert shaped(CLAIM, [1.0], shape=False, expect="rises").verdict == "off"


def test_a_source_that_contradicts_itself() -> None:
    assert contradicted(CLAIM, [1.0], rival=1.0).verdict == "source-inconsistent"
    assert contradicted(CLAIM, [5.0], rival=1.0).verdict == "reproduced"
    assert contradicted(CLAIM, [3.0], rival=1.0).verdict == "off"


def test_tables_and_tallies() -> None:
    rows = [equals(CLAIM, [5.0], within=0.1), equals(CLAIM, [9.0], within=0.1)]
    assert tally(rows) == "2 rows: 1 reproduced, 1 off"
    assert as_table(rows, "E").rows[1][:7] == ("m", "%", 5.0, None, 9.0, 9.0, 9.0)
