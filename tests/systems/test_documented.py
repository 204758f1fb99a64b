"""The page about systems and policies names all that there are, with their parameters."""

import re
from pathlib import Path

import pytest

from sloop.policies import POLICIES
from sloop.policies.build import keys_of
from sloop.systems import SYSTEMS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "systems.md").read_text()
COMMON = {"batch_max", "variant", "period_ms"}


def rows(heading: str) -> dict[str, str]:
    """The rows below a heading, joined by the last name in their first column."""
    found: dict[str, str] = {}
    name = ""
    for line in PAGE.partition(f"\n{heading}\n")[2].partition("\n#")[0].splitlines():
        if match := re.match(r"\| `([\w-]+)` \|", line):
            name = match[1]
        if line.startswith("| ") and name:
            found[name] = found.get(name, "") + line
    return found


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_and_its_parameters(name: str) -> None:
    assert name in rows("## Systems")
    described = rows("### Parameters")[name]
    missing = [key for key in SYSTEMS[name].parameters if key not in COMMON and f"`{key}`" not in described]
    assert not missing, f"docs/systems.md: describe {missing} of {name}"


@pytest.mark.parametrize("verb", sorted(POLICIES.keys() - {"scale"}))
def test_every_policy_and_its_parameters(verb: str) -> None:
    described = rows("## Policies")[verb]
    for name, kind in POLICIES[verb].items():
        assert f"`{name}`" in described, f"docs/systems.md: describe the {verb} policy {name}"
        missing = [key for key in keys_of(kind) if f"`{key}`" not in described]
        assert not missing, f"docs/systems.md: describe {missing} of {name}"


def test_every_scale_policy() -> None:
    assert all(f"`{name}`" in PAGE for name in POLICIES["scale"])
