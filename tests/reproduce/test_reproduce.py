"""A publication by name."""

from pathlib import Path

import msgspec
import pytest

from sloop import reproduce as room
from sloop.errors import InputError
from sloop.reproduce import REPRODUCTIONS, data_folder, reproduce
from sloop.reproduce.outcome import Reproduction
from sloop.reproduce.rows import Claim, equals
from sloop.reproduce.sponge.trials import Outcome, Trial

KEYS = {"experiment", "metric", "unit", "paper", "ours", "low", "high", "verdict", "note"}


def instead(trial: Trial) -> Outcome:
    """An outcome without a run."""
    return Outcome(1.0 + trial.seed, 8.0, (1.0,) * 20, (8.0,) * 20, 1, 900.0)


@pytest.mark.parametrize("quick", [True, False])
def test_sponge_from_end_to_end(quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room.sponge, "play", instead)
    heard: list[float] = []
    found = reproduce("sponge", quick=quick, data=tmp_path, processes=1, progress=lambda share, _: heard.append(share))
    assert heard[-1] == 1.0
    assert {"S0", "S1", "S2", "S3", "check 6"} <= {row.experiment for row in found.rows}
    assert ("ablation" in {row.experiment for row in found.rows}) is not quick
    assert any("link" in line for line in found.assumed)
    assert all("synthetic link" in row.note for row in found.rows if row.experiment not in {"S1", "S2"})
    assert msgspec.to_builtins(found.rows[0]).keys() >= KEYS


def test_a_reproduction_on_a_page() -> None:
    row = equals(Claim(experiment="check 1", metric="m < n", unit="%", paper=1.0), [1.0], within=0.1)
    found = Reproduction("sponge", "Somebody, 2024", (row,), (), ("a guess",))
    assert found.summary == "1 rows: 1 reproduced"
    text = found.page()
    assert "m &lt; n" in text
    assert "a guess" in text
    assert [table.title for table in found.tables()] == ["Check 1"]


def test_unknown_names() -> None:
    with pytest.raises(InputError, match="nothing to reproduce") as caught:
        reproduce("spunge")
    assert caught.value.help == "did you mean 'sponge'?"
    with pytest.raises(InputError) as caught:
        reproduce("qqq")
    assert caught.value.help == f"there are: {', '.join(REPRODUCTIONS)}"


def test_where_public_data_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOOP_SHARED", str(tmp_path))
    assert data_folder() is None
    (tmp_path / "data").mkdir()
    assert data_folder() == tmp_path / "data"
