"""Rows of E6 to E9 follow from outcomes."""

from sloop.reproduce.ipa import knobs
from sloop.reproduce.ipa.trials import Results


def test_rows_from_made_up_outcomes(results: Results) -> None:
    rows = {(row.experiment, row.metric): row for row in knobs.rows(results, ("video", "sum-qa"), quick=False)}
    assert rows["E8: video", "violations, lstm"].verdict == "reproduced"
    assert rows["E8: video", "violations, reactive"].verdict == "shape"
    assert rows["E8: video", "violations, reactive over lstm"].verdict == "reproduced"
    assert rows["E8: video, starts of 24 s", "violations, oracle"].verdict == "reproduced"
    assert rows["E7: video", "IPA's median latency over FA2-low's"].verdict == "reproduced"
    assert rows["E6: video", "cores, accuracy preferred"].verdict == "off"
    assert rows["E9: sum-qa", "cores with PAS', bursty"].verdict == "shape"


def test_a_quick_one_leaves_out_slow_starts_and_ranks(results: Results) -> None:
    experiments = {row.experiment for row in knobs.rows(results, ("video",), quick=True)}
    assert experiments == {"E6: video", "E7: video", "E8: video"}
    assert len(knobs.trials(("video",), quick=True)) < len(knobs.trials(("video",), quick=False))
