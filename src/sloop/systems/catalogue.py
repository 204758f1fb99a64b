"""The catalogue: sloop's own systems and general baselines. Packages beside it add published systems as entry points.

Each system names its policies, their parameters and its source. Policies are in the order of the verbs: order, batch,
route, drop, admit, place, forecast, scale, divide. Omitted parameters have the policy's default.

The entries are prototypes: `build_system` returns a copy whose policies have fresh state.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from sloop.app.application import SystemChoice
from sloop.core.application import why_not_in_place
from sloop.core.oversight import Overseer
from sloop.core.protocols import Policies
from sloop.core.stage import QUEUE_PART
from sloop.options import Declared, Value, as_value, keys_of
from sloop.plugins import Registry
from sloop.policies.admit import Open, PredictiveAdmit
from sloop.policies.batch import Adaptive, Deadline, Full, WorkConserving
from sloop.policies.divide import MaxMin
from sloop.policies.drop import Age, PredictiveDrop
from sloop.policies.forecast import Last, MovingMax
from sloop.policies.order import Edf, Fifo
from sloop.policies.oversee import Autopilot
from sloop.policies.place import BestFit, SpreadPlacement
from sloop.policies.provision import CheapestStart
from sloop.policies.route import Fastest, FirstIdle, LeastLoaded, RoundRobin, Smallest, SmoothWeighted
from sloop.policies.scale.bodies import Bodies
from sloop.policies.scale.harbor import Harbor
from sloop.policies.scale.kubernetes import Hpa, Kpa, Vpa
from sloop.policies.scale.mixed import Mixed
from sloop.policies.scale.static import Static
from sloop.policies.scale.vertical import Vertical
from sloop.systems.system import PLACES, SIMULATED, System, is_system_file, system_in_file
from sloop.units import s

DISSERTATION: Final = "Razavi, dissertation, TU Darmstadt 2024, chapter"

LAST_10_S: Final = Last(window_ns=s(10))
"""FA2 plans for the arrival rate, not the completion rate, which is lower under overload."""
ONE_KIND: Final = "keeps to one kind of hardware: `hardware`, or the first on which every stage has a profile"
FIXED_MIX: Final = (
    "runs a fixed mix if `stages: {NAME: {groups: …}}` declares one, and else keeps to one kind (`hardware`)"
)
"""What systems do on a mixed cluster."""

CHOICES_MIN: Final = 2
"""Fewer systems leave nothing to choose."""

_ELASTIC: Final = Policies(
    Edf(), Deadline(), RoundRobin(), PredictiveDrop(batch="full"), Open(),
    # The node with the most free cores, so that a replica has room to grow in place.
    SpreadPlacement(), Last(window_ns=s(2)), Vertical(), MaxMin(idle="use"),
)  # fmt: skip

CATALOGUE: Final = (
    # The default: cores follow the load in place, and a second replica starts where a node is not enough.
    System(
        "elastic",
        "system",
        "sloop; resizes in place as Sponge (EuroMLSys 2024) and Biscale do, and starts more where that is not enough",
        _ELASTIC,
        ONE_KIND,
    ),
    # One replica for each stage, resized in place, never a second one.
    System(
        "vertical-only",
        "baseline",
        f"the vertical baseline of Biscale: {DISSERTATION} P4",
        replace(
            _ELASTIC,
            order=Fifo(),
            batch=Full(patience=1.0),
            scale=Vertical(replicas_max=1, throughput="with_queue", margin=1.0),
            divide=MaxMin(),
        ),
        ONE_KIND,
    ),
    # The cheapest replicas on all kinds of hardware: our own. Each batch runs on the fastest idle replica, and takes as
    # many requests as that replica can serve in time, which differs between kinds.
    System(
        "mixed",
        "system",
        "sloop; the cheapest mix of instances as in Ribbon (Li et al., SC 2021) and Kairos (Li et al., HPDC 2023)",
        Policies(
            Edf(),
            Deadline(),
            Fastest(),
            PredictiveDrop(),
            Open(),
            BestFit(),
            MovingMax(horizon_ns=s(10), window_ns=s(2)),
            Mixed(),
            MaxMin(),
        ),
        "uses all kinds of hardware: the cheapest mix of replicas that carries the forecast in time",
    ),
    # Models that share devices of all kinds: our own, which counts waiting, neighbours and prices.
    System(
        "harbor",
        "system",
        "sloop",
        Policies(
            Edf(),
            Full(patience=1.0),
            SmoothWeighted(),
            PredictiveDrop(),
            Open(),
            BestFit(),
            MovingMax(horizon_ns=s(10), window_ns=s(2)),
            Harbor(),
            MaxMin(),
        ),
        "uses all kinds of hardware: the placement that serves most in time, and the cheapest of equally good ones",
    ),
    # A fixed number of replicas that accept only requests they can answer in time, so that overload costs no goodput.
    # If the profile is too pessimistic, it refuses requests that could be served.
    System(
        "early-drop",
        "system",
        "after the early drop of Nexus (Shen et al., SOSP 2019), with admission by the believed drain time",
        Policies(
            Edf(),
            Deadline(),
            FirstIdle(),
            PredictiveDrop(proactive=True),
            PredictiveAdmit(trust=QUEUE_PART),  # who is admitted and still too late is dropped before it costs anything
            BestFit(),
            Last(),
            Static(),
            MaxMin(),
        ),
        FIXED_MIX,
    ),
    # Replicas by utilisation.
    System(
        "hpa",
        "baseline",
        "Kubernetes, Horizontal Pod Autoscaling, autoscaling/v2 with its default behaviour",
        Policies(Fifo(), WorkConserving(), RoundRobin(), Age(), Open(), SpreadPlacement(), Last(), Hpa(), MaxMin()),
        ONE_KIND,
    ),
    # Replicas by concurrency, down to none.
    System(
        "kpa",
        "baseline",
        "Knative Serving's autoscaler with its default configuration; a cold start's backlog counted once",
        Policies(Fifo(), WorkConserving(), LeastLoaded(), Age(), Open(), SpreadPlacement(), Last(), Kpa(), MaxMin()),
        ONE_KIND,
    ),
    # Replica size by utilisation, changed by restart.
    System(
        "vpa",
        "baseline",
        "a threshold scaler after Kubernetes' Vertical Pod Autoscaler: target 0.7, a restart at most every 60 s",
        Policies(Fifo(), WorkConserving(), FirstIdle(), Age(), Open(), BestFit(), Last(), Vpa(), MaxMin()),
        ONE_KIND,
    ),
    # A fixed number of replicas with fixed cores.
    System(
        "static",
        "baseline",
        "the fixed allocations that Sponge (EuroMLSys 2024), FA2 and Biscale are compared with",
        Policies(Edf(), WorkConserving(), FirstIdle(), Age(), Open(), BestFit(), Last(), Static(), MaxMin()),
        FIXED_MIX,
    ),
    # Each start in the way that serves soonest, bursts met by shadows or bodies, whichever is cheaper: our own.
    # Bodies go to the node with the most free cores, so that they have room for a shadow.
    System(
        "headstart",
        "system",
        "sloop; chooses among the techniques of Flashpoint (San Juan, thesis, Waterloo 2023) and AsyFunc",
        Policies(
            Fifo(),
            Adaptive(overflow="early_drop"),
            Smallest(),
            Age(),
            Open(),
            SpreadPlacement(),
            LAST_10_S,
            Bodies(),
            MaxMin(),
            CheapestStart(partition=True),
        ),
        ONE_KIND,
    ),
    # The cheapest of several systems that keeps the target, as the simulator says of the last hour's requests: our own.
    System(
        "autopilot",
        "system",
        "sloop; the server asks its own simulator, with the last hour's requests",
        _ELASTIC,
        "does what the system that it has chosen does",
        overseer=Autopilot(),
    ),
)

SYSTEMS: Final[Registry[System]] = Registry("sloop.systems", {system.name: system for system in CATALOGUE}, System)
"""By name, those that installed distributions add after these."""


def build_system(name: str, parameters: Declared | None = None) -> System:
    """The system `name` with the declared parameters, e.g. `build_system("sponge", {"margin": 0.9})`. A name that ends
    in `.py` is the path of a file that defines `SYSTEM`.

    Each call returns policies with fresh state. `InputError`, with file and line, for an unknown system, parameter or
    policy (it suggests the nearest) and for values of the wrong type or out of range.
    """
    declared = as_value({} if parameters is None else parameters)
    if is_system_file(name):
        made = system_in_file(name).fresh(declared)
    else:
        made = replace(declared, content=name).entry(SYSTEMS, "system").fresh(declared)
    return made if made.overseer is None else _with_choices(made, made.overseer, declared)


def choice_of(value: Value) -> SystemChoice:
    """A system as a user declares one: a name, or a mapping with `name` and parameters."""
    fields = value.mapping(required=("name",)) if isinstance(value.content, Mapping) else {"name": value}
    parameters = {key: each.content for key, each in fields.items() if key != "name"}
    return SystemChoice(fields["name"].text(), parameters, value.path or "system", value.file, value.lines)


def deciding(choice: SystemChoice, chosen: str) -> SystemChoice:
    """The system that decides where an overseer has chosen: the first one if `chosen` is empty. The choice itself, if
    it has no overseer."""
    overseer = build_system(choice.name, choice.declared).overseer
    if overseer is None:
        return choice
    among = list(map(choice_of, Value(overseer.among, "among").elements()))
    return next((each for each in among if each.text == chosen), among[0])


def beginning_with(choice: SystemChoice, overseer: Overseer, chosen: str) -> SystemChoice:
    """A system with this overseer, with `chosen` as the first one in `among`, so that it decides at first. Unchanged if
    the overseer has no parameter `among`."""
    if "among" not in keys_of(type(overseer)):
        return choice
    among = sorted(overseer.among, key=lambda each: choice_of(Value(each, "among")).text != chosen)
    return SystemChoice(choice.name, {**choice.parameters, "among": among}, choice.path)


def _with_choices(system: System, overseer: Overseer, declared: Value) -> System:
    """A system with an overseer, and the systems among which it chooses. InputError if these cannot take over from each
    other."""
    among = declared.under("among", overseer.among)
    found: dict[str, System] = {}
    for value in among.elements():
        choice = choice_of(value)
        made = found[choice.text] = build_system(choice.name, replace(value, content=choice.parameters))
        first = next(iter(found.values()))
        why = "it chooses among systems itself" if made.overseer is not None else ""
        why = why or why_not_in_place(first.policies, made.policies) or why_not_in_place(made.policies, first.policies)
        if why:
            value.fail(f"{made.name!r} and {first.name!r} cannot take over from each other: {why}", "leave one out")
    if len(found) < len(overseer.among) or len(found) < CHOICES_MIN:
        among.wrong(f"at least {CHOICES_MIN} systems, each with its own parameters")
    runs = tuple(place for place in PLACES if all(place in each.runs for each in found.values()))
    choices = {text: each.policies for text, each in found.items()}
    return replace(system, policies=next(iter(choices.values())), choices=choices, runs=runs or SIMULATED)
