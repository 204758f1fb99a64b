"""The catalogue: published parameters, and that every entry can be shown, changed, copied and is documented."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sloop.core.protocols import Policies
from sloop.options import keys_of
from sloop.policies.admit import Open, PredictiveAdmit
from sloop.policies.batch import Adaptive, Deadline, Full, Slack, WorkConserving
from sloop.policies.divide import MaxMin, Priority
from sloop.policies.drop import Age, PredictiveDrop
from sloop.policies.forecast import Last, MovingMax
from sloop.policies.order import Edf, Fifo
from sloop.policies.place import BestFit, SpreadPlacement
from sloop.policies.provision import AsPlaced, CheapestStart
from sloop.policies.route import Fastest, FirstIdle, LeastLoaded, RoundRobin, Smallest, SmoothWeighted
from sloop.policies.scale.bodies import Bodies
from sloop.policies.scale.harbor import Harbor
from sloop.policies.scale.kubernetes import Hpa, Kpa, Vpa
from sloop.policies.scale.mixed import Mixed
from sloop.policies.scale.static import Static, StaticGroup
from sloop.policies.scale.vertical import Vertical
from sloop.systems import SYSTEMS, build_system
from sloop.systems.registry import POLICIES
from sloop.units import s

PUBLISHED: dict[str, tuple[str, Any]] = {
    "elastic": ("system", Vertical(replicas=1, replicas_max=0, throughput="pure", margin=0.9)),
    "autopilot": ("system", Vertical(replicas=1, replicas_max=0, throughput="pure", margin=0.9)),
    "vertical-only": ("baseline", Vertical(replicas_max=1, throughput="with_queue", margin=1.0)),
    "early-drop": ("system", Static()),
    "hpa": ("baseline", Hpa(target=0.8, stabilisation_ns=s(300), period_ns=s(15))),
    "kpa": (
        "baseline",
        Kpa(
            stable_ns=s(60),
            period_ns=s(2),
            utilisation=0.7,
        ),
    ),
    "vpa": ("baseline", Vpa(target=0.7, settle_ns=s(60))),
    "mixed": ("system", Mixed()),
    "harbor": ("system", Harbor()),
    "headstart": ("system", Bodies(gamma=0.7, counts_shadows=False, bursts="cheapest")),
    "static": ("baseline", Static()),
}
"""Kind and scale policy; the figures stand here although most are defaults, because they are published."""

_VERTICAL = (Fifo(), Full(patience=1.0), RoundRobin(), PredictiveDrop(batch="full"), Open(), SpreadPlacement())
_ONE_REPLICA = (WorkConserving(), FirstIdle(), Age(limit=1.0), Open(), BestFit(), Last(window_ns=s(1)))
_IN_TURN = (RoundRobin(), Age(limit=3.0), Open(), BestFit(), Last(window_ns=s(10)))
DATA_PATHS: dict[str, tuple[Any, ...]] = {
    "elastic": (Edf(), Deadline(), *_VERTICAL[2:], Last(window_ns=s(2))),
    "vertical-only": (*_VERTICAL, Last(window_ns=s(2))),
    "early-drop": (
        Edf(),
        Deadline(),
        FirstIdle(),
        PredictiveDrop(proactive=True),
        PredictiveAdmit(trust=0.7),
        BestFit(),
        Last(),
    ),
    "mixed": (
        Edf(),
        Deadline(),
        Fastest(),
        PredictiveDrop(),
        Open(),
        BestFit(),
        MovingMax(horizon_ns=s(10), window_ns=s(2)),
    ),
    "hpa": (Fifo(), WorkConserving(), RoundRobin(), Age(limit=1.0), Open(), SpreadPlacement(), Last()),
    "kpa": (Fifo(), WorkConserving(), LeastLoaded(), Age(limit=1.0), Open(), SpreadPlacement(), Last()),
    "vpa": (Fifo(), *_ONE_REPLICA),
    "headstart": (
        Fifo(),
        Adaptive(overflow="early_drop"),
        Smallest(),
        Age(limit=1.0),
        Open(),
        SpreadPlacement(),
        Last(window_ns=s(10)),
    ),
    "harbor": (
        Edf(),
        Full(patience=1.0),
        SmoothWeighted(),
        PredictiveDrop(),
        Open(),
        BestFit(),
        MovingMax(horizon_ns=s(10), window_ns=s(2)),
    ),
    "static": (Edf(), *_ONE_REPLICA),
}
DATA_PATHS["autopilot"] = DATA_PATHS["elastic"]  # the first of those among which it chooses
"""All policies before the scale policy, in the order of the verbs."""


@pytest.mark.parametrize("name", SYSTEMS.own)
def test_published_parameters(name: str) -> None:
    system = build_system(name)
    kind, scale = PUBLISHED[name]
    divide = MaxMin(idle="use" if name in ("elastic", "autopilot") else "leave")
    provision = CheapestStart(partition=True) if name == "headstart" else AsPlaced()
    expected: tuple[Any, ...] = (*DATA_PATHS[name], scale, divide, provision)
    assert (system.kind, system.policies) == (kind, Policies(*expected))


@pytest.mark.parametrize(
    ("name", "declared", "changes"),
    [
        (
            "elastic",
            {"margin": 0.95, "batch": "slack", "drop": "predictive"},
            {"scale": Vertical(margin=0.95), "batch": Slack(), "drop": PredictiveDrop()},
        ),
        ("static", {"cores": 8}, {"scale": Static(replicas=1, cores=8)}),
        ("hpa", {"divide": "priority"}, {"divide": Priority()}),
        ("early-drop", {"replicas": 2, "cores": 4}, {"scale": Static(replicas=2, cores=4)}),
    ],
    ids=[
        "policies of other verbs",
        "static-8",
        "another rule for too few cores",
        "early-drop",
    ],
)
def test_published_variants_are_parameters(name: str, declared: dict[str, Any], changes: dict[str, Any]) -> None:
    assert build_system(name, declared).policies == replace(build_system(name).policies, **changes)


def test_a_fixed_mix_is_written_as_groups() -> None:
    groups = [{"hardware": "c5.2xlarge", "replicas": 2}, {"hardware": "g4dn.xlarge", "batch_max": 64}]
    scale = build_system("static", {"stages": {"only": {"groups": groups}}}).policies.scale
    assert isinstance(scale, Static)
    assert scale.stages["only"].groups == (
        StaticGroup(hardware="c5.2xlarge", replicas=2),
        StaticGroup(hardware="g4dn.xlarge", batch_max=64),
    )


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "systems.md").read_text()


def rows(heading: str) -> dict[str, str]:
    """The rows below a heading, joined by the last name in their first column."""
    found: dict[str, str] = {}
    name = ""
    for line in PAGE.partition(f"\n{heading}\n")[2].partition("\n#")[0].splitlines():
        if match := re.match(r"\| (any system|`[\w-]+`) \|", line):
            name = match[1].strip("`")
        if line.startswith("| ") and name:
            found[name] = found.get(name, "") + line
    return found


def described_parameters(name: str) -> str:
    """The rows that describe a system's parameters, with those of any system and those that they refer to."""
    parameters = rows("### Parameters")
    described = parameters["any system"] + parameters[name]
    return described + "".join(map(described_parameters, re.findall(r"all others as for `([\w-]+)`", described)))


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_is_documented_with_its_parameters(name: str) -> None:
    assert name in rows("## Systems")
    described = described_parameters(name)
    missing = [key for key in SYSTEMS[name].parameters if f"`{key}`" not in described]
    assert not missing, f"docs/systems.md: describe {missing} of {name}"


@pytest.mark.parametrize("verb", sorted(POLICIES.keys() - {"scale"}))
def test_every_policy_is_documented_with_its_parameters(verb: str) -> None:
    described = rows("## Policies")[verb]
    for name, kind in POLICIES[verb].items():
        assert f"`{name}`" in described, f"docs/systems.md: describe the {verb} policy {name}"
        missing = [key for key in keys_of(kind) if f"`{key}`" not in described]
        assert not missing, f"docs/systems.md: describe {missing} of {name}"


def test_every_scale_policy_is_documented() -> None:
    assert all(f"`{name}`" in PAGE for name in POLICIES["scale"])
