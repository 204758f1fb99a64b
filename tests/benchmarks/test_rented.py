"""The page of rented nodes: which runs it needs, and what it says of them."""

import sys
from typing import Any

import pytest
from msgspec import structs

from benchmarks import rented
from sloop_systems.comparison.harness import UNSEEN, Results, Wanted
from sloop_systems.paldia.experiments.ours import SCENES
from sloop_systems.paldia.experiments.runs import PaldiaResult, PaldiaTrial
from tests.sloop_systems.paldia.test_experiments import result


def test_the_page_has_each_system_on_each_load(monkeypatch: pytest.MonkeyPatch) -> None:
    published = list[tuple[Any, ...]]()
    asked = list[tuple[PaldiaTrial, int]]()

    def played(wanted: Wanted[PaldiaTrial], data: str, **options: object) -> Results[PaldiaResult]:
        asked.extend(wanted)
        return Results(
            {
                structs.replace(trial, seed=seed): structs.replace(result(trial.system), usd_per_h=0.25 + seed)
                for trial, seeds in wanted
                for seed in range(seeds)
            }
        )

    monkeypatch.setattr(sys, "argv", ["rented", "--seeds", "2", "--arrivals", "at once"])
    monkeypatch.setattr(rented, "run_trials", played)
    monkeypatch.setattr(rented, "publish", lambda *given, write: published.append(given))
    rented.main()
    assert {trial.arrivals for trial, _ in asked} == {"clumps"}
    assert {seeds for _, seeds in asked} == {2}
    ((_, _, text, figures),) = published
    rows = [line for line in text.splitlines() if line.startswith(tuple(f"| {scene} | " for scene in SCENES))]
    assert len(rows) == len(asked)
    assert "| Twitter, DPN92 | mixed | 0.750 (0.250 to 1.250) | 99.40 (99.40 to 99.40) |" in rows
    assert f"seeds {UNSEEN} to {UNSEEN + 1}" in text
    assert [figure.name for figure in figures] == ["price-at-once"]
