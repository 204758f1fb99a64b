"""Outcomes that were never played."""

import pytest

from sloop.reproduce.biscale import evaluation, sensitivity
from sloop.reproduce.biscale.trials import Outcome, Results, Trial, seeded

LEVEL = {"biscale": 0.1, "fa2": 3.0, "vertical": 41.0, "fa2_kit": 20.0}


def made_up(trial: Trial) -> Outcome:
    """As good as its kind, a little worse with every seed and looser drop rule; larger at the jump, settled at 85 s."""
    worse = 0.01 * trial.seed + {"predictive": 0, "age": 1, "age3": 2, "never": 3}[trial.drop]
    cores = [4.0] * trial.seconds
    for second in range(58, min(85, trial.seconds)):
        cores[second] = 30.0
    for second in range(85, min(520, trial.seconds)):
        cores[second] = 15.0
    single = tuple(float(not 58 <= second < 85) for second in range(trial.seconds))
    flat = (1.0,) * trial.seconds
    return Outcome(LEVEL[trial.kind] + worse, sum(cores) / len(cores), flat, tuple(cores), flat, single, flat)


def results_of(*, quick: bool) -> Results:
    wanted = [*evaluation.trials(quick=quick), *sensitivity.trials(quick=quick)]
    return Results({trial: made_up(trial) for trial in seeded(wanted, "")})


@pytest.fixture(name="results", scope="session")
def results_fixture() -> Results:
    """All of a full reproduction."""
    return results_of(quick=False)
