"""Where the public traces and recorded runs lie, which are read from there and never part of the product."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def sponge_data() -> Path:
    """The folder of Sponge's public artefact; the test is skipped where it is missing."""
    shared = Path(os.environ.get("SLOOP_SHARED", ROOT.parent / "shared"))
    folder = shared / "data" / "saeid93__sponge"
    if not folder.is_dir():
        pytest.skip("the data of Sponge's artefact is not here")
    return folder
