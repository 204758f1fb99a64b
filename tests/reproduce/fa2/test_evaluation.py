"""From outcomes to rows and figures, without a run; and from end to end."""

from collections.abc import Sequence

import pytest
from msgspec import structs

from sloop.reproduce import REPRODUCTIONS, fa2
from sloop.reproduce.fa2 import pictures
from sloop.reproduce.fa2.application import CPU
from sloop.reproduce.fa2.evaluation import Evaluation, fixed, moving
from sloop.reproduce.fa2.offline import PLANNERS, RATES, Sweep
from sloop.reproduce.fa2.trials import Outcome, Results, Trial
from sloop.reproduce.rows import Row


def instead(trial: Trial) -> Outcome:
    """An outcome without a run: good for those who plan with deadlines, bad for others on few replicas."""
    poor = trial.pools == "optimal" and trial.plan in {"ds2", "inferline"}
    late, dropped = (14.0, 60.0 if trial.plan == "ds2" else 20.0) if poor else (0.5, 0.0)
    third = trial.seconds // 3
    shares = [100.0 if third <= at < third + 20 else 0.0 for at in range(trial.seconds)]
    steady = (10.0,) * trial.seconds
    return Outcome(late, dropped, 10.0, 70.0, tuple(shares), steady, (8,) * trial.seconds)


def results_of(evaluation: Evaluation, seeds: Sequence[int]) -> Results:
    wanted = [*evaluation.trials(), *evaluation.long()]
    return Results(
        {t: instead(t) for one in wanted for seed in seeds for t in [structs.replace(one, seed=seed)]}, seeds
    )


def named(rows: Sequence[Row], metric: str) -> Row:
    return next(row for row in rows if row.metric == metric)


@pytest.mark.parametrize("quick", [True, False])
def test_rows_from_outcomes(quick: bool) -> None:
    evaluation = Evaluation(quick=quick)
    results = results_of(evaluation, (0, 1))
    rows = evaluation.rows(results, None if quick else results)
    assert {"E1", "E2", "E4", "E7", "7.3"} <= {row.experiment for row in rows}
    assert ("E3" in {row.experiment for row in rows}) is not quick
    assert named(rows, "FA2, violations").verdict == "reproduced"
    assert named(rows, "DS2, dropped").verdict == "reproduced"
    assert named(rows, "DS2, late").ours == 14.0
    assert named(rows, "FA2 recovers from 8 → 27/s").ours == 20.0


def test_every_trial_once() -> None:
    evaluation = Evaluation(quick=True)
    trials = evaluation.trials()
    assert len(trials) == len(set(trials))
    assert evaluation.of_fixed(fixed("ds2")) in trials
    assert evaluation.of_moving(moving("ds2", "fluctuating")) in trials
    assert not evaluation.long()


def test_figures_show_every_rival() -> None:
    evaluation = Evaluation(quick=True)
    results = results_of(evaluation, (0,))
    sweep = Sweep(CPU, 3, {name: tuple(range(10, 10 + len(RATES))) for name in PLANNERS})
    names = [series.name for series in pictures.of_sweep(sweep, "x").panels[0].series]
    assert names == ["ds2", "inferline", "optimal", "fa2"]
    assert len(pictures.of_moving(evaluation, results).panels) == 3
    assert pictures.of_fixed(evaluation, results).panels[0].ticks[1] == "fa2"
    assert "d/1.15 0.50 %" in pictures.of_headroom(evaluation, results).alt
    assert len(pictures.of_sizes().panels[0].series) == 3


def test_from_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa2, "play", instead)
    heard: list[float] = []
    found = REPRODUCTIONS["fa2"](quick=True, data=None, processes=1, progress=lambda share, _: heard.append(share))
    assert heard[-1] == 1.0
    assert {figure.name for figure in found.figures} >= {"sweep-cores", "fluctuating", "fixed"}
    assert any("fitted" in line for line in found.assumed)
    assert found.page().count("<svg") == len(found.figures)
