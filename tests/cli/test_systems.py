import json

from click.testing import CliRunner

from sloop.cli import main
from sloop.core.protocols import Policies
from sloop.systems import SYSTEMS


def test_json_names_every_system_with_a_policy_for_each_verb() -> None:
    found = json.loads(CliRunner().invoke(main, ["systems", "--json"]).stdout)["systems"]
    assert [row["name"] for row in found] == list(SYSTEMS)
    for row in found:
        assert row.keys() >= {"name", "source", "kind", "slots", "runs"}
        assert row["slots"].keys() == set(Policies.__dataclass_fields__)
        assert set(row["runs"]) <= {"live", "sim"}


def test_people_see_the_source() -> None:
    assert SYSTEMS["static"].source[:30] in CliRunner().invoke(main, ["systems"]).stdout
