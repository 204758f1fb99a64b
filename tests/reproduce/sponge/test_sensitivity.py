"""Rows of the checks follow from outcomes."""

from sloop.reproduce.sponge import sensitivity
from sloop.reproduce.sponge.trials import Results


def test_rows_from_made_up_outcomes(results: Results) -> None:
    rows = sensitivity.rows(results)
    assert {row.experiment for row in rows} == {"check 7", "check 8", "check 9"}
    by_metric = {row.metric: row for row in rows}
    assert by_metric["violations, static-16, Poisson, l/1.05"].verdict == "shape"  # 0.15 to 0.16, at most 0.1
    assert by_metric["violations, clmax"].low < by_metric["violations, clmax"].high
    assert by_metric["violations, per_batch - clmax, margin 1"].verdict == "reproduced"  # no difference
    assert by_metric["violations, full dispatch, delay, keep"].verdict == "off"  # not worse than the other


def test_fifo_is_the_same_trial_otherwise() -> None:
    trial = sensitivity.fifo(sensitivity.STEADY)
    assert ("order", "fifo") in trial.parameters
    assert trial.system == "sponge"
