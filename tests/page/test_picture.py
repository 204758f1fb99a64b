"""What the page shows equals what the fold says."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from sloop.actions import StartBatch
from sloop.app.application import SystemChoice
from sloop.app.load import load_scenario
from sloop.events import Finished
from sloop.page.picture import COUNTS, LEVELS, SECONDS, Picture
from sloop.runlog import RecordedLog, read_log
from sloop.runlog.fold import DeploymentState
from sloop.runlog.summary import RunRow
from sloop.sim.scenarios import run_scenario
from sloop.systems.replay import beginning_of, header_of
from sloop.vocabulary import Outcome, Request
from tests.sim.scene import records_of, world

SCENARIO = Path(__file__).parents[2] / "examples/three/bursts.yaml"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RecordedLog, RunRow]:
    """Twenty-five seconds of three applications on cores that are too few for a burst."""
    path = tmp_path_factory.mktemp("log") / "run.jsonl"
    scenario = replace(load_scenario(SCENARIO), duration_s=25.0)
    made = run_scenario(scenario, SystemChoice("elastic"), log=path)
    return read_log(path), made.row


def picture_of(log: RecordedLog) -> Picture:
    return Picture(log.header, beginning_of(log).fold, zero_unix_s=1e9)


def plain(value: object) -> Any:
    """As a browser has it."""
    return msgspec.json.decode(msgspec.json.encode(value))


def test_totals_and_rows_equal_the_summary_of_the_run(run: tuple[RecordedLog, RunRow]) -> None:
    log, row = run
    picture = picture_of(log)
    for now_ns, record in log:
        picture.append(now_ns, record)
    whole = plain(picture.whole())
    assert {each.name for each in row.applications} == set(whole["totals"]) == set(whole["applications"])
    for application in row.applications:
        total = whole["totals"][application.name]
        assert total == {
            "arrivals": application.requests,
            **{outcome.value: getattr(application, outcome.value) for outcome in Outcome},
        }
        series = whole["series"][application.name]
        for kind in ("counts", "minute_counts"):
            sums = np.sum(series[kind], axis=0)
            assert dict(zip(COUNTS[1:], sums[1:], strict=True)) == total
        assert whole["applications"][application.name]["slo_ms"] == application.slo_ms
    missed = sum(each["outcome"] != "served" for each in whole["missed"])
    assert missed == min(200, row.late + row.dropped + row.rejected + row.failed)


def test_a_batch_shows_its_rows_and_sizes_and_a_stage_its_padding() -> None:
    stage = {
        "profile": {"latency_ms": {"table": {1: {1: 20.0}, 8: {1: 60.0}}}, "max_batch": 8},
        "pad": {"ids": 0},
        "sizes": [64],
    }
    made = world(stage=stage, trace={"kind": "poisson", "rate": 90, "rows": 2, "sizes": [16, 64]})
    setup = made.setup()
    fold = DeploymentState(setup.parts(), nodes=made.deployment.cluster, start_ns=0)
    picture = Picture(header_of(setup, origin="sim"), fold, zero_unix_s=1e9)
    running = set()
    elements = padded = 0
    for now_ns, record in records_of(made):
        picture.append(now_ns, record)
        if isinstance(record, StartBatch):
            ((found,),) = (version["stages"] for version in plain(picture.whole())["applications"]["scene"]["versions"])
            (replica,) = found["replicas"]
            assert (replica["running"], replica["size"]) == (record.rows, 64)
            running.add(record.rows)
        elif isinstance(record, Finished):
            elements, padded = elements + record.elements, padded + record.padded
    assert running >= {2, 8}
    (stages,) = (version["stages"] for version in plain(picture.whole())["applications"]["scene"]["versions"])
    assert stages[0]["padding"] == pytest.approx(padded / (elements + padded))
    assert 0.2 < stages[0]["padding"] < 0.5


def test_changes_tell_every_row_of_the_whole(run: tuple[RecordedLog, RunRow]) -> None:
    log, _ = run
    picture = picture_of(log)
    counts: dict[str, dict[int, list[int]]] = {}
    levels: dict[str, list[list[Any]]] = {}
    decisions: list[dict[str, Any]] = []
    for place, (now_ns, record) in enumerate(log):
        picture.append(now_ns, record)
        if place % 997 == 0:
            take(picture, counts, levels, decisions)
    take(picture, counts, levels, decisions)
    whole = plain(picture.whole())
    for name, series in whole["series"].items():
        assert [counts[name][at] for at in sorted(counts[name])] == series["counts"]
        assert levels[name] == series["levels"]
    assert decisions == whole["decisions"]


def take(
    picture: Picture,
    counts: dict[str, dict[int, list[int]]],
    levels: dict[str, list[list[Any]]],
    decisions: list[dict[str, Any]],
) -> None:
    changes = plain(picture.changes())
    for name, rows in changes["counts"].items():
        counts.setdefault(name, {}).update({row[0]: row for row in rows.values()})
    for name, rows in changes["levels"].items():
        levels.setdefault(name, []).extend(rows)
    decisions.extend(changes["decisions"])


def test_latencies_of_a_second_are_those_of_the_requests_that_ended_in_it(run: tuple[RecordedLog, RunRow]) -> None:
    log, _ = run
    picture = picture_of(log)
    sent: dict[int, tuple[int, str]] = {}
    ended: dict[tuple[str, int], list[int]] = {}
    for now_ns, record in log:
        picture.append(now_ns, record)
        if isinstance(record, Request):
            sent[record.id] = record.sent_ns, record.application
        elif getattr(record, "outcome", None) in (Outcome.SERVED, Outcome.LATE):
            sent_ns, name = sent[record.request]  # type: ignore[union-attr]
            ended.setdefault((name, now_ns // 10**9), []).append(now_ns - sent_ns)
    p99 = LEVELS.index("p99_ms")
    for name, series in plain(picture.whole())["series"].items():
        for row in series["levels"]:
            latencies = sorted(ended.get((name, row[0]), []))
            expected = round(np.percentile(latencies, 99, method="higher") / 1e6, 3) if latencies else None
            assert row[p99] == expected, (name, row[0])


def test_memory_is_bounded_by_the_rings(run: tuple[RecordedLog, RunRow]) -> None:
    log, _ = run
    picture = picture_of(log)
    for now_ns, record in log:
        picture.append(now_ns, record)
    picture.reach(2 * SECONDS * 10**9)
    for run_state in picture.state.runs:
        assert not run_state.served_ns
        assert not any(stage.waits_ns for stage in run_state.stages.values())
    series = plain(picture.whole())["series"]
    assert all(len(rows["levels"]) == SECONDS for rows in series.values())
