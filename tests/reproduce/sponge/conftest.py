"""Made-up outcomes, so that rows and figures can be tested without playing a thousand runs."""

import os
from pathlib import Path

import pytest

from sloop.reproduce.sponge import ablations, evaluation, sensitivity
from sloop.reproduce.sponge.trials import Outcome, Results, Trial, seeded

SEEDS = (0, 1)


def outcome(trial: Trial, seed: int) -> Outcome:
    """FA2 from cold is worst, then static-8, Sponge, static-16; a slower model is worse."""
    base = {"static-8": 9.0, "static-16": 0.1, "fa2 cold": 3.0, "fa2 warm": 0.05}.get(trial.policy, 0.3)
    share = base * (1 + 10 * (1.1 - trial.ratio)) + 0.01 * seed
    return Outcome(share, 8.0 + seed, (100.0, *[share] * 19), (1.0, *[8.0] * 19), 1, 900.0)


@pytest.fixture
def results() -> Results:
    """For every trial of every experiment."""
    wanted = [*evaluation.trials(), *sensitivity.trials(), *ablations.trials()]
    made = {seeded(trial, seed, ""): outcome(trial, seed) for trial in reversed(wanted) for seed in SEEDS}
    return Results(made, SEEDS, "")


@pytest.fixture
def data() -> Path:
    """The folder of public data."""
    root = Path(os.environ.get("SLOOP_SHARED", Path(__file__).resolve().parents[5] / "shared")) / "data"
    if not (root / "saeid93__sponge").is_dir():
        pytest.skip("the public artefact of Sponge is not at hand; set SLOOP_SHARED to the folder that holds data/")
    return root
