"""E5 is measured where it can be, and judged by what was measured."""

import pytest

from sloop.reproduce.biscale import threads


def test_without_a_second_core_or_the_model_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable_cpus", lambda: [0])
    assert threads.rows() == []
    monkeypatch.setattr(threads, "usable_cpus", lambda: [0, 1])
    monkeypatch.setattr(threads, "_source", lambda: None)
    assert threads.rows() == []


def test_a_verdict_follows_from_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnx", reason="the model is among onnx's test data")
    monkeypatch.setattr(threads, "usable_cpus", lambda: [0, 1])
    times_ms = {"one": 100.0, "two within": 60.0, "two between": 98.0}
    monkeypatch.setattr(threads, "_measured", lambda path: (times_ms, 1.9))
    within, between = threads.rows()
    assert (within.ours, within.verdict) == (40.0, "reproduced")
    assert within.note.endswith("two had 1.9 cores")
    assert (round(between.ours, 9), between.verdict) == (2.0, "reproduced")


def test_it_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnx", reason="the model is among onnx's test data")
    monkeypatch.setattr(threads, "ROUNDS", 1)
    monkeypatch.setattr(threads, "usable_cpus", lambda: [0, 1])
    assert [row.experiment for row in threads.rows()] == ["E5 threads"] * 2
