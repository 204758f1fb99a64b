"""A publication by name."""

from pathlib import Path

import pytest

from sloop.errors import InputError
from sloop_systems.comparison import REPRODUCTIONS, data_folder, reproduce


def test_unknown_names() -> None:
    with pytest.raises(InputError, match="unknown reproduction 'spunge'") as caught:
        reproduce("spunge")
    assert caught.value.help == "did you mean 'sponge'?"
    with pytest.raises(InputError) as caught:
        reproduce("qqq")
    assert caught.value.help == f"known here: {', '.join(REPRODUCTIONS)}"


def test_where_public_data_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOOP_SHARED", str(tmp_path))
    assert data_folder() is None
    (tmp_path / "data").mkdir()
    assert data_folder() == tmp_path / "data"
