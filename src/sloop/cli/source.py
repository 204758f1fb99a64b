"""What `TRACE` may be on the command line: a file, a scenario's file, or a mapping as in a scenario's `trace:`."""

from pathlib import Path

from sloop.app.document import parse
from sloop.app.load import load_scenario
from sloop.arrivals.declare import trace_from
from sloop.arrivals.trace import Trace

HELP = "TRACE is a file, a scenario (.yaml), or a mapping such as '{kind: poisson, rate: 100}'."


def trace_at(source: str, *, seed: int, duration_s: float | None) -> Trace:
    """The trace `source` names. InputError where it names none."""
    if source.lstrip().startswith("{"):
        spec = parse(source, "TRACE").plain()
        assert isinstance(spec, dict), spec
        plain = {str(key): value for key, value in spec.items()}
        return trace_from(plain, seed=seed, duration_s=duration_s, folder=Path(), where="TRACE")
    if source.endswith((".yaml", ".yml")):
        scenario = load_scenario(source)
        length_s = scenario.duration_s if duration_s is None else duration_s
        return trace_from(scenario.trace, seed=seed, duration_s=length_s, folder=Path(), where=source)
    return trace_from({"file": source}, seed=seed, duration_s=duration_s, folder=Path(), where="TRACE")
