"""The guide to application files: every file in it is right and means what it says."""

from pathlib import Path

import pytest

from sloop.app.document import parse_yaml
from sloop.app.load import read_deployment, read_scenario
from sloop.app.scenario import Truth
from sloop.errors import InputError
from sloop.systems.setup import set_up
from tests.app.conftest import application_from_text, scenario_from_text

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "applications.md"
BLOCKS = [block.split("```")[0] for block in GUIDE.read_text().split("```yaml\n")[1:]]


@pytest.mark.parametrize("text", BLOCKS, ids=range(len(BLOCKS)))
def test_every_file_is_right(text: str, tmp_path: Path) -> None:
    (tmp_path / "search.yaml").write_text(BLOCKS[0].replace("name: demo", "name: search"))
    (tmp_path / "labels.txt").touch()
    document = parse_yaml(text)
    read = read_scenario if "\ntrace" in text else read_deployment
    assert read(document, tmp_path)


def test_the_deployment_it_shows_can_be_planned(tmp_path: Path) -> None:
    (tmp_path / "search.yaml").write_text(BLOCKS[0].replace("name: demo", "name: search"))
    text = next(text for text in BLOCKS if "search-eu" in text)
    setup = set_up(read_deployment(parse_yaml(text), tmp_path))
    assert [each.application.key for each in setup.applications] == ["search", "search-eu", "faces"]
    mixed = next(text for text in BLOCKS if "system: mixed" in text)
    assert set_up(application_from_text(mixed)).application.hardware == ("c5.2xlarge", "g4dn.xlarge", "rack")


def test_the_defaults_it_prints_are_the_defaults() -> None:
    scenario = next(scenario_from_text(text) for text in BLOCKS if "these are the defaults" in text)
    assert scenario.truth == Truth()
    assert (scenario.duration_s, scenario.seed) == (60, 0)


def test_the_error_it_prints_is_the_error() -> None:
    with pytest.raises(InputError) as caught:
        application_from_text(BLOCKS[0].replace("slo_ms", "slo_m"), file="app.yaml")
    assert f"error: {caught.value}" in GUIDE.read_text()
