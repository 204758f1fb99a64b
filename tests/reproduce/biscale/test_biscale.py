"""Biscale's reproduction from end to end, without a run."""

from pathlib import Path

import pytest

from sloop.reproduce import biscale, reproduce, twitter
from sloop.reproduce.biscale import threads
from tests.reproduce.biscale.conftest import made_up


@pytest.mark.parametrize("quick", [True, False])
def test_from_end_to_end(quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(biscale, "play", made_up)
    monkeypatch.setattr(twitter, "held_out", lambda data: twitter.biscale("video", data))
    monkeypatch.setattr(threads, "rows", list)
    heard: list[float] = []
    found = reproduce("biscale", quick=quick, data=tmp_path, processes=1, progress=lambda share, _: heard.append(share))
    assert heard[-1] == 1.0
    experiments = {row.experiment for row in found.rows}
    assert {"programs", "E1 video", "E2 audio", "E3 nlp", "E6 dropping", "bound A", "bound C"} <= experiments
    assert ("bound B" in experiments) is not quick
    assert all("stand-in" in row.note for row in found.rows if row.experiment.startswith(("E1", "bound")))
    assert any(line.startswith("requests: assumed") for line in found.assumed)
    assert not quick or "violations" in found.page()  # drawing takes a second, once is enough
