"""Rows of S3 follow from outcomes."""

from sloop.reproduce.sponge import evaluation
from sloop.reproduce.sponge.evaluation import DERIVED, POLICIES
from sloop.reproduce.sponge.trials import Results


def test_every_policy_has_its_derived_figures() -> None:
    assert {policy.policy for policy in POLICIES} == DERIVED.keys()


def test_rows_from_made_up_outcomes(results: Results) -> None:
    rows = {row.metric: row for row in evaluation.rows(results)}
    assert rows["violations, static-16, mean = l/1.1"].verdict == "shape"  # 0.1 is not 0.21, but below Sponge
    assert rows["violations, Sponge"].paper == 0.3
    assert rows["violations, FA2"].verdict == "reproduced"  # 4.5 to 4.51 of 5 within 0.5
    assert rows["FA2's worst second"].ours == 100
    assert rows["cores saved against static-16"].ours == 100 * (1 - 8.5 / 16)
    assert rows["violations, Sponge - static-16, mean = l/1.1"].verdict == "reproduced"
    assert rows["violations, Sponge - static-16, mean = l/1.05"].verdict == "off"  # 0.45 - 0.15 rounds to more than 0.3
    assert rows["violations, static-8, mean = l"].verdict == "off"
