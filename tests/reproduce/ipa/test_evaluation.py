"""Rows of E1 to E4 follow from outcomes."""

from sloop.reproduce.ipa import evaluation
from sloop.reproduce.ipa.trials import Results


def test_rows_from_made_up_outcomes(results: Results) -> None:
    rows = {(row.experiment, row.metric): row for row in evaluation.rows(results, ("video", "audio-qa", "nlp"))}
    assert rows["audio-qa", "cores, fa2-low, steady_low"].verdict == "reproduced"  # 10 of 8, within 2
    assert rows["audio-qa", "cores, ipa, bursty, burst"].verdict == "off"  # 21 of 33
    assert rows["audio-qa", "cores, ipa, bursty, burst"].ours == 21
    assert rows["video", "cores, ipa, steady_high"].paper == 10
    assert rows["A: video", "IPA's cores above FA2-low's, steady_low"].verdict == "reproduced"
    assert rows["A: video", "IPA's 100 · PAS above FA2-low's, steady_low"].ours == 7
    assert rows["A: video", "FA2-high's cores over IPA's, steady_high"].verdict == "reproduced"
    assert rows["C: nlp", "FA2-high's largest cores"].verdict == "off"  # 80 of more than 500
    assert rows["D: nlp", "runs in which IPA's accuracy lies between"].ours == 100


def test_the_headline(results: Results) -> None:
    rows = {row.metric: row for row in evaluation.rows(results, ("audio-sent",))}
    assert rows["largest gain over FA2-low"].verdict == "off"  # 53 over 46 are 15 %
    assert rows["100 · PAS of IPA, bursty, burst"].ours == 48
