"""FA2's rule for one model: the artefact's thresholds, and its recorded run decision by decision."""

import re
from pathlib import Path

import pytest

from sloop.solvers.fa2_single import Answer, solve

YOLO_1_CORE_MS = (136.0, 302.0, 468.0, 633.0, 799.0, 965.0)
"""l(b, 1) of the artefact's YOLOv5s fit."""


def replicas(remaining_ms: float) -> int | None:
    answer = solve(
        YOLO_1_CORE_MS, 20.0, way_max_ms=1000.0 - remaining_ms, limit_ms=900.0, slo_ms=1000.0, replicas_max=16
    )
    return answer.replicas if answer else None


@pytest.mark.parametrize(
    ("least_ms", "most_ms", "expected"), [(917, 1000, 4), (781, 916, 5), (645, 780, 7), (509, 644, 10), (0, 508, None)]
)
def test_thresholds(least_ms: int, most_ms: int, expected: int | None) -> None:
    assert {replicas(remaining_ms) for remaining_ms in range(least_ms, most_ms + 1)} == {expected}


def test_says_how_it_gets_there() -> None:
    answer = solve(YOLO_1_CORE_MS, 20.0, way_max_ms=50.0, limit_ms=900.0, slo_ms=1000.0, replicas_max=16)
    assert answer == Answer(replicas=4, batch=1, latency_ms=136.0, rounds=5)


def test_larger_batches_where_they_save_replicas() -> None:
    answer = solve((100.0, 110.0), 20.0, way_max_ms=0.0, limit_ms=900.0, slo_ms=1000.0, replicas_max=16)
    assert answer == Answer(replicas=2, batch=2, latency_ms=110.0, rounds=5)


def column(text: str, name: str) -> list[float]:
    start = text.index("[", text.index(f"'{name}':"))
    return [float(number) for number in re.findall(r"[\d.]+", text[start : text.index("]", start)])]


def test_replay_of_the_recorded_run(sponge_data: Path) -> None:
    """Every row of the artefact's log; it keeps the previous count where nothing was measured or nothing holds."""
    text = (sponge_data / "notebook_outputs" / "comparison.txt").read_text()
    remaining, recorded = column(text, "sla"), column(text, "replicas")
    count, ours = 1, []
    for remaining_ms in remaining:
        count = (replicas(remaining_ms) if remaining_ms else None) or count
        ours.append(count)
    assert len(ours) == 561
    assert ours == recorded
