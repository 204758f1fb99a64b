"""What needs no run comes out as published, or as enumerated."""

from sloop.reproduce.ipa import offline


def test_nothing_is_off() -> None:
    rows = offline.rows()
    assert {row.verdict for row in rows} == {"reproduced", "source-inconsistent"}
    assert [row.metric for row in rows if row.verdict == "source-inconsistent"] == ["speech to text, 5 × mean latency"]


def test_deciding_is_timed_for_every_size_and_pipeline() -> None:
    """Times are not judged here: see the number of labels in tests/solvers/test_labels.py."""
    sizes, pipelines = dict.fromkeys(offline.SIZES, 5.0), {"video": 150.0}
    verdicts = [row.verdict for row in offline.timing_rows(sizes, pipelines)]
    assert verdicts == ["reproduced", "off"]
