"""Made-up outcomes, so that rows and figures can be tested without playing hundreds of runs."""

import pytest

from sloop.reproduce.ipa import evaluation, knobs
from sloop.reproduce.ipa.pipelines import ARTEFACT
from sloop.reproduce.ipa.trials import Outcome, Results, Trial, seeded

SEEDS = (0, 1)
INTERVALS = 120


def outcome(trial: Trial) -> Outcome:
    """FA2-low is thrifty, FA2-high dear and accurate; a burst doubles cores and costs IPA and RIM accuracy; who
    foresees less violates more."""
    low, high = {"steady_low": (1, 1), "steady_high": (2, 2)}.get(trial.workload, (1, 2))
    each = {"fa2-low": 10.0, "ipa": 10.5, "rim": 15.0, "fa2-high": 40.0}[trial.policy]
    load = [high if 40 <= place < 70 else low for place in range(INTERVALS)]
    best = 53.0 if trial.policy == "fa2-high" else 46.0 if trial.policy == "fa2-low" else 0.0
    pas = [best or (53.0 if level == 1 else 48.0) for level in load]
    cores = [each * level for level in load]
    violations = {"oracle": 0.1, "lstm": 0.5, "reactive": 1.0}[trial.predictor] * trial.start_s / 8
    return Outcome(
        violations=violations + 0.01 * trial.seed,
        cores=sum(cores) / INTERVALS,
        pas=sum(pas) / INTERVALS,
        cores_used=sum(cores) / INTERVALS,
        p99_ms=1000.0,
        cores_by_interval=tuple(cores),
        pas_by_interval=tuple(pas),
        violations_by_interval=(violations,) * INTERVALS,
        latencies_ms=tuple(10.0 * percent for percent in range(1, 101)),
        requests=10_000,
    )


def made(pipelines: tuple[str, ...] = tuple(ARTEFACT)) -> Results:
    """For every trial of every experiment."""
    wanted = [*evaluation.trials(pipelines), *knobs.trials(pipelines, quick=False)]
    ready = [seeded(trial, seed, "") for trial in wanted for seed in SEEDS]
    return Results({trial: outcome(trial) for trial in ready}, SEEDS, "")


@pytest.fixture
def results() -> Results:
    """All five pipelines."""
    return made()
