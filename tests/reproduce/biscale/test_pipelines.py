"""The published pipelines."""

import pytest

from sloop.reproduce.biscale.pipelines import AUDIO, MOTIVATION, NLP, PIPELINES, VIDEO


def test_latencies_alone_on_one_core_and_on_eight() -> None:
    published = {
        "detect": (176.3, 41.3),
        "classify": (70.5, 23.1),
        "transcribe": (320.9, 128.6),
        "sentiment": (70.7, 16.6),
        "identify": (104.5, 38.7),
        "translate": (376.8, 122.1),
        "summarise": (370.1, 140.1),
    }
    found = {
        name: (form.latency_ms(1, 1), form.latency_ms(1, 8))
        for pipeline in PIPELINES.values()
        for name, form in pipeline.models
    }
    assert found.keys() == published.keys()
    for name, expected in published.items():
        assert found[name] == pytest.approx(expected, abs=0.051)


def test_profiles_keep_their_source() -> None:
    assert all(p.origin == "fitted" and p.source for one in (VIDEO, AUDIO, NLP) for p in one.profiles.values())
    assert VIDEO.profiles["detect"].load_s == 5.5


def test_the_motivating_model_is_as_fast_as_theirs() -> None:
    (_, form), *_ = MOTIVATION.models
    assert 1000 / form.latency_ms(1, 1) == pytest.approx(26, abs=0.1)
    assert 1000 / form.latency_ms(1, 8) == pytest.approx(126, abs=4)
