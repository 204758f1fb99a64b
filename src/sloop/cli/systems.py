"""`sloop systems`: lists the available systems, or shows one of them."""

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any, Final

import click

from sloop.cli.command import CommandOutput, command, facts, table
from sloop.report.tables import Table
from sloop.systems import SYSTEMS, build_system
from sloop.systems.system import System, is_system_file, parameters_of

EXAMPLE = """
sloop systems
sloop systems elastic
sloop systems ./mine.py
sloop systems --json | jq '.systems[].name'
"""
SOURCE_WIDTH: Final = 30
NAMES_WIDTH, TEXT_WIDTH = 44, 50
"""Of columns, so that a line has at most 100 characters."""
NOTES = "A NAME that ends in .py is a file of yours that defines a system; it is executed in this process."


@command("systems", example=EXAMPLE, notes=NOTES)
@click.argument("name", required=False)
def systems(name: str | None) -> CommandOutput:
    """List the systems, sloop's own and then those of each package, with their publications and scaling policies.

    With NAME, show one system: what it does on a mixed cluster, its policies, and all their parameters with defaults.
    """
    if name is not None:
        return _one(name)
    packages: dict[str, list[System]] = {}
    for each, system in SYSTEMS.items():
        packages.setdefault(SYSTEMS.package_of(each), []).append(system)
    value = [{**_described(each), "package": package} for package, own in packages.items() for each in own]
    by_text: dict[str, list[str]] = {}
    for system in SYSTEMS.values():
        by_text.setdefault(system.mixed, []).append(system.name)
    mixed = tuple((fill(", ".join(names), NAMES_WIDTH), fill(text, TEXT_WIDTH)) for text, names in by_text.items())
    more = "`sloop systems NAME` shows the parameters of one system; docs/systems.md says what each system does"
    return CommandOutput(
        {"systems": value},
        [
            *(table(_table(package, own)) for package, own in packages.items()),
            table(Table("On a cluster of several kinds of hardware", ("systems", "use of the kinds"), mixed)),
            more,
        ],
    )


def _table(package: str, systems: Sequence[System]) -> Table:
    """The systems of a package: sloop's own, a publication's with its baselines, or those of another distribution."""
    rows = [
        (s.name, s.kind, s.slots["scale"]["name"], ", ".join(s.runs), fill(s.source, SOURCE_WIDTH)) for s in systems
    ]
    return Table(package, ("system", "kind", "scaling policy", "runs", "source"), tuple(rows))


def _described(system: System) -> Mapping[str, Any]:
    """A system as a value for `--json`."""
    return {
        "name": system.name,
        "source": system.source,
        "kind": system.kind,
        "mixed": system.mixed,
        "slots": system.slots,
        "runs": list(system.runs),
    }


def _one(name: str) -> CommandOutput:
    system = build_system(name)
    parameters = parameters_of(system)
    policies = tuple(
        (verb, slot["name"], _first_line(getattr(system.policies, verb))) for verb, slot in system.slots.items()
    )
    rows = tuple((each.key, _written(each.default), each.range, each.meaning) for each in parameters)
    head = [
        ("system", f"{system.name}, a {system.kind}"),
        ("source", system.source),
        ("runs", _places(system)),
        ("mixed clusters", system.mixed or "it does not say what it does there"),
    ]
    usage = f"write them in an application file: `system: {{name: {name}, …}}`; docs/systems.md has examples"
    executed = [f"{name} was executed in this process"] if is_system_file(name) else []
    return CommandOutput(
        {**_described(system), "parameters": parameters},
        [
            facts(head),
            table(Table("Policies", ("decides", "policy", "what it does"), policies)),
            table(Table("Parameters", ("key", "default", "range", "meaning"), rows)),
            usage,
            *executed,
        ],
    )


def _places(system: System) -> str:
    return " and ".join({"live": "in a server", "sim": "in the simulator"}[run] for run in system.runs)


def _first_line(policy: object) -> str:
    """What the class of a policy says of itself, in one line, with the keys as users write them."""
    return " ".join((type(policy).__doc__ or "").split("\n\n", 1)[0].split()).replace("_ns`", "_ms`")


def _written(default: object) -> str:
    """A default as YAML: `[]` for none of a list, `""` for an empty text."""
    if isinstance(default, bool):
        return "true" if default else "false"
    if default is None:
        return "–"
    if isinstance(default, float):
        return f"{default:g}"
    if isinstance(default, list | tuple):
        return str(list(default))
    return str(default) if default != "" else '""'
