"""Where the shared public traces are, or a skip that says they are not here."""

import os
from pathlib import Path

import pytest


@pytest.fixture
def shared_data() -> Path:
    root = Path(os.environ.get("SLOOP_SHARED", Path(__file__).resolve().parents[3] / "shared")) / "data"
    if not root.is_dir():
        pytest.skip(f"no public traces at {root}; set SLOOP_SHARED to the folder that holds data/")
    return root
