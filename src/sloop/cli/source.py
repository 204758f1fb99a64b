"""What traces and links may be on the command line: a file, or a mapping as in a scenario's `trace:` and `link:`."""

from pathlib import Path

from sloop.app.document import parse
from sloop.app.load import load_scenario
from sloop.workload.declare import trace_from
from sloop.workload.link import Link, link_from, read_link
from sloop.workload.trace import Trace

HELP = "TRACE is a file, a scenario (.yaml), or a mapping such as '{kind: poisson, rate: 100}'."


def trace_at(source: str, *, seed: int, duration_s: float | None) -> Trace:
    """The trace `source` names. InputError where it names none."""
    if source.lstrip().startswith("{"):
        return trace_from(mapping(source, "TRACE"), seed=seed, duration_s=duration_s, folder=Path(), where="TRACE")
    if source.endswith((".yaml", ".yml")):
        scenario = load_scenario(source)
        length_s = scenario.duration_s if duration_s is None else duration_s
        return trace_from(scenario.trace, seed=seed, duration_s=length_s, folder=Path(), where=source)
    return trace_from({"file": source}, seed=seed, duration_s=duration_s, folder=Path(), where="TRACE")


def link_at(source: str, *, seed: int) -> Link:
    """The link `source` names: a file of bandwidths, or a mapping such as `{kind: lte}`."""
    if source.lstrip().startswith("{"):
        return link_from(mapping(source, "link"), seed=seed, folder=Path(), where="link")
    return read_link(source)


def mapping(text: str, where: str) -> dict[str, object]:
    """A YAML mapping on one line."""
    return {key: value.plain() for key, value in parse(text, where).mapping().items()}
