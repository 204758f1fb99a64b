"""The guide to application files: every file in it is right and means what it says."""

from pathlib import Path

import pytest

from sloop.app.scenario import Truth
from sloop.errors import InputError
from tests.app.conftest import application_from_text, scenario_from_text

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "applications.md"
BLOCKS = [block.split("```")[0] for block in GUIDE.read_text().split("```yaml\n")[1:]]


@pytest.mark.parametrize("text", BLOCKS, ids=range(len(BLOCKS)))
def test_every_file_is_right(text: str) -> None:
    read = scenario_from_text if "trace:" in text else application_from_text
    assert read(text)


def test_the_defaults_it_prints_are_the_defaults() -> None:
    scenario = next(scenario_from_text(text) for text in BLOCKS if "these are the defaults" in text)
    assert scenario.truth == Truth()
    assert (scenario.duration_s, scenario.seed) == (60, 0)


def test_the_error_it_prints_is_the_error() -> None:
    with pytest.raises(InputError) as caught:
        application_from_text(BLOCKS[0].replace("slo_ms", "slo_m"), file="app.yaml")
    assert f"error: {caught.value}" in GUIDE.read_text()
