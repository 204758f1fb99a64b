"""The five pipelines are put together from consistent parts."""

import pytest

from sloop.reproduce.ipa import published
from sloop.reproduce.ipa.pipelines import ARTEFACT, PREFERENCES, THESIS


@pytest.mark.parametrize("name", ARTEFACT)
def test_a_pipeline_is_whole(name: str) -> None:
    pipeline = ARTEFACT[name]
    for place, step in enumerate(pipeline.steps):
        names = [model.name for model in step.models]
        assert len(set(names)) == len(names)
        assert pipeline.model(place, step.high) in step.models
        accuracies = [model.accuracy for model in step.models]
        assert accuracies == sorted(accuracies)
        assert all(0 < accuracy <= 1 for accuracy in accuracies)
    assert pipeline.drop_s > pipeline.slo_s
    assert pipeline.name == name


def test_everything_is_told_of_all_five() -> None:
    assert set(ARTEFACT) == set(THESIS) == set(PREFERENCES)
    assert set(ARTEFACT) == set(published.BURSTY) == set(published.STEADY_LOW)
    assert set(ARTEFACT) == set(published.PREFERENCES) == set(published.VIOLATIONS)
