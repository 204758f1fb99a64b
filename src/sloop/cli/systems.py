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
        {"name": s.name, "source": s.source, "kind": s.kind, "slots": s.slots, "runs": list(s.runs)}
        for s in SYSTEMS.values()
    ]
    rows = [(s.name, s.kind, s.slots["scale"]["name"], ", ".join(s.runs), s.source) for s in SYSTEMS.values()]
    columns = ("system", "kind", "scaling policy", "runs", "source")
    more = "--json adds all policies of each system with their parameters; docs/systems.md says what each system does"
    return CommandOutput({"systems": value}, [table(Table("", columns, tuple(rows))), more])
