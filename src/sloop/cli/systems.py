"""`sloop systems`: lists the available systems."""

from sloop.cli.command import CommandOutput, command, table
from sloop.report.tables import Table
from sloop.systems import SYSTEMS


@command("systems", example="sloop systems\nsloop systems --json | jq '.systems[].name'")
def systems() -> CommandOutput:
    """List the systems, published ones and baselines, with their publications and scaling policies.

    --json has every policy of each system with its parameters.
    """
    value = [
        {"name": s.name, "source": s.source, "kind": s.kind, "mixed": s.mixed, "slots": s.slots, "runs": list(s.runs)}
        for s in SYSTEMS.values()
    ]
    rows = [
        (s.name, s.kind, s.slots["scale"]["name"], s.slots["divide"]["name"], ", ".join(s.runs), s.source)
        for s in SYSTEMS.values()
    ]
    columns = ("system", "kind", "scaling policy", "divides cores", "runs", "source")
    by_text: dict[str, list[str]] = {}
    for system in SYSTEMS.values():
        by_text.setdefault(system.mixed, []).append(system.name)
    mixed = tuple((", ".join(names), text) for text, names in by_text.items())
    more = "--json adds all policies of each system with their parameters; docs/systems.md says what each system does"
    return CommandOutput(
        {"systems": value},
        [
            table(Table("", columns, tuple(rows))),
            table(Table("On a cluster of several kinds of hardware", ("systems", "use of the kinds"), mixed)),
            more,
        ],
    )
