"""`sloop systems`: what there is to choose from."""

from sloop.cli.command import Answer, command
from sloop.cli.screen import table
from sloop.report.tables import Table
from sloop.systems import SYSTEMS


@command("systems", example="sloop systems\nsloop systems --json | jq '.systems[].name'")
def systems() -> Answer:
    """List the systems: published ones and the baselines they are compared with, and the policies they are made of."""
    value = [
        {"name": s.name, "source": s.source, "kind": s.kind, "slots": s.slots, "runs": list(s.runs)}
        for s in SYSTEMS.values()
    ]
    rows = [(s.name, s.kind, s.slots["scale"]["name"], ", ".join(s.runs), s.source) for s in SYSTEMS.values()]
    return Answer({"systems": value}, [table(Table("", ("system", "kind", "scale", "runs", "source"), tuple(rows)))])
