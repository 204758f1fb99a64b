"""Reads a scenario out of a document: an application's keys and those of its world.

Promises a `Scenario` whose every range holds, or an InputError that names file, line and key. The insides of `trace`
and `truth.network.link` are read by `sloop.workload`; here they only have to be mappings or files that exist.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import get_args

from sloop.app.application import Stage
from sloop.app.document import Value
from sloop.app.read_application import read_application, read_systems
from sloop.app.read_graph import SHARE_SLACK
from sloop.app.scenario import (
    ColdStart,
    Delivery,
    Failures,
    NetworkTruth,
    ResizeRule,
    Scenario,
    ServiceTruth,
    Truth,
)

SCENARIO_KEYS = ("trace", "duration_s", "seed", "truth", "systems")
DURATION_S, SEED = 60.0, 0


def read_scenario(document: Value, folder: Path) -> Scenario:
    """The scenario in `document`, whose relative paths start at `folder`."""
    application = read_application(document, folder, extra=SCENARIO_KEYS)
    fields = document.mapping(required=("trace",))
    systems = read_systems(fields["systems"], folder) if "systems" in fields else None
    if systems is None:
        systems = read_systems(fields["system"], folder) if "system" in fields else (application.system,)
    elif "system" in fields:
        fields["systems"].fail("a scenario has either 'system' or 'systems', not both", "keep 'systems'")
    return Scenario(
        application=application,
        trace=_trace(fields["trace"], folder),
        duration_s=fields["duration_s"].number(above=0, most=1e8) if "duration_s" in fields else DURATION_S,
        seed=fields["seed"].integer(least=0) if "seed" in fields else SEED,
        truth=read_truth(fields["truth"], folder, application.stages) if "truth" in fields else Truth(),
        systems=systems,
    )


def _trace(value: Value, folder: Path) -> dict[str, object]:
    fields = value.mapping()
    if ("kind" in fields) == ("file" in fields):
        value.fail("a trace has either 'kind' or 'file'", "for example {kind: poisson, rate: 100}")
    trace: dict[str, object] = {key: field.plain() for key, field in fields.items()}
    if "file" in fields:
        trace["file"] = str(fields["file"].existing(folder))
    else:
        trace["kind"] = fields["kind"].text()
    return trace


def read_truth(value: Value, folder: Path, stages: Sequence[Stage] = ()) -> Truth:
    """The truth declared under `truth:`, of an application of these stages; what is not said keeps its default."""
    keys = ("service", "profile_error", "resize_ms", "resize", "cold_start", "network", "failures", "fan_out", "shares")
    fields = value.mapping(keys)
    resize: ResizeRule = "next_batch"
    if "resize" in fields and fields["resize"].choice(get_args(ResizeRule)) == "rescale":
        resize = "rescale"
    return Truth(
        service=_service(fields["service"]) if "service" in fields else ServiceTruth(),
        profile_error=_number(fields, "profile_error", 1.0, above=0, most=100),
        resize_ms=_number(fields, "resize_ms", 50.0, least=0, most=1e7),
        resize=resize,
        cold_start=_cold_start(fields["cold_start"]) if "cold_start" in fields else ColdStart(),
        network=_network(fields["network"], folder) if "network" in fields else None,
        failures=_failures(fields["failures"]) if "failures" in fields else None,
        fan_out=_fan_out(fields["fan_out"], stages) if "fan_out" in fields else {},
        shares=_shares(fields["shares"], stages) if "shares" in fields else {},
    )


def _fan_out(value: Value, stages: Sequence[Stage]) -> dict[str, tuple[int, ...]]:
    """Per stage with `each`, how many parts there are: a number, or several that are equally likely."""
    found = {}
    for name, numbers in _of_stages(value, [stage.name for stage in stages if stage.each], "each").items():
        found[name] = tuple(each.integer(least=0, most=1_000_000) for each in numbers.some())
        if not found[name]:
            numbers.wrong("at least one number of parts")
    return found


def _shares(value: Value, stages: Sequence[Stage]) -> dict[str, float]:
    """Per stage with `when`, how many take it; alternatives by all together at most."""
    named = {stage.name: stage for stage in stages if stage.when}
    found = {name: share.number(least=0, most=1) for name, share in _of_stages(value, named, "when").items()}
    told: dict[tuple[str, str], dict[object, float]] = {}
    for name, share in found.items():
        for when in named[name].when:
            shares = told.setdefault((when.of, when.output), {})
            shares[when.values if when.output else name] = share
            if sum(shares.values()) > 1.0 + SHARE_SLACK:
                what = f"more than all are to take the branches after {when.of!r}"
                value.mapping()[name].fail(what, "alternatives exclude each other: their shares sum up to 1 at most")
    return found


def _of_stages(value: Value, names: Collection[str], key: str) -> dict[str, Value]:
    """What is said of stages that have a key."""
    if not names and value.mapping():
        value.fail(f"no stage has `{key}`", "remove it")
    return value.mapping(tuple(names))


def _number(
    fields: dict[str, Value], key: str, default: float, *, above: float = -1.0, least: float = 0.0, most: float
) -> float:
    return fields[key].number(above=above, least=least, most=most) if key in fields else default


def _service(value: Value) -> ServiceTruth:
    fields = value.mapping(("ratio", "cv"))
    return ServiceTruth(
        fields["ratio"].number(above=0, most=100) if "ratio" in fields else None,
        fields["cv"].number(least=0, most=10) if "cv" in fields else None,
    )


def _cold_start(value: Value) -> ColdStart:
    fields = value.mapping(("start_s", "jitter", "warm"))
    return ColdStart(
        start_s=_number(fields, "start_s", 10.0, most=1e6),
        jitter=_number(fields, "jitter", 0.0, most=1),
        warm=fields["warm"].boolean() if "warm" in fields else True,
    )


def _network(value: Value, folder: Path) -> NetworkTruth:
    fields = value.mapping(("link", "payload_kb", "semantics"), required=("link",))
    link = fields["link"]
    payloads: tuple[float, ...] = (284.0,)
    if "payload_kb" in fields:
        payloads = tuple(each.number(least=0, most=1e9) for each in fields["payload_kb"].some())
        if not payloads:
            fields["payload_kb"].wrong("at least one payload size")
    semantics: Delivery = "delay"
    if "semantics" in fields and fields["semantics"].choice(get_args(Delivery)) == "attach":
        semantics = "attach"
    if not isinstance(link.content, dict):
        return NetworkTruth(str(link.existing(folder)), payloads, semantics)
    made = {key: field.plain() for key, field in link.mapping().items()}
    return NetworkTruth(made, payloads, semantics)


def _failures(value: Value) -> Failures:
    fields = value.mapping(("mtbf_s",), required=("mtbf_s",))
    return Failures(fields["mtbf_s"].number(above=0, most=1e12))
