"""A system: one policy for each verb, with its published parameters and its source (law 4).

A user's system is a Python file that defines `SYSTEM`; its path is its name. See `docs/write-a-system.md`.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, get_args

from sloop.core.oversight import Overseer
from sloop.core.planner import NO_PAIR
from sloop.core.protocols import Policies
from sloop.errors import InputError
from sloop.options import (
    Declared,
    Value,
    adjust,
    as_value,
    check_ranges,
    keys_of,
    nearest,
    placed,
    ranges_of,
    read_options,
    written,
)
from sloop.systems.registry import POLICIES
from sloop.text import listed
from sloop.user_code import module_in

SystemKind = Literal["system", "baseline"]
KINDS: Final = get_args(SystemKind)
PLACES: Final = ("live", "sim")
SIMULATED: Final = ("sim",)
"""Where a system runs that knows the requests which will come: in no server."""
PLAN_ARGUMENTS: Final = 3
"""Of a scaling policy's `plan`: the time, the view, and what it remembers."""
PROTOCOLS: Final[Mapping[str, tuple[Any, ...]]] = {
    field.name: get_args(field.type) or (field.type,) for field in fields(Policies)
}
"""The protocol of each verb, and the one of policies that remember, where there is one."""
VERBS: Final = tuple(PROTOCOLS)


@dataclass(frozen=True, slots=True)
class System:
    """A composition of policies, of parameters only: what policies remember, a run keeps.

    InputError for a parameter of a policy that is out of range, and for a class that lacks an attribute of its
    protocol, has one that nobody reads, or keeps something besides its parameters.
    """

    name: str
    kind: SystemKind
    source: str
    policies: Policies
    mixed: str = ""
    """What it does on a cluster of several kinds of hardware, in one sentence; empty if it does not say."""
    runs: tuple[str, ...] = PLACES
    """Where: `live` in a server, `sim` in the simulator."""
    overseer: Overseer | None = None
    """Who chooses which of several systems decides. Such a system has no policies of its own: `policies` are those of
    the first one when it is built. Its parameters are those of the overseer."""
    choices: Mapping[str, Policies] = field(default_factory=dict)
    """By name, the policies of these systems. Set when it is built."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"the kind of {self.name!r} is {self.kind!r}, not {listed([*map(repr, KINDS)], 'or')}")
        if not self.runs or not set(self.runs) <= set(PLACES):
            raise ValueError(
                f"the runs of {self.name!r} are {self.runs!r}, not a tuple of {listed([*map(repr, PLACES)])}"
            )
        if self.overseer is not None:
            overseer: Any = type(self.overseer)  # mypy takes no class for Hashable
            with placed(Value({}, f"overseer of system {self.name}")):
                _check_attributes(overseer, Overseer)
                check_ranges(self.overseer)
        for verb, (plain, *remembering) in PROTOCOLS.items():
            policy = getattr(self.policies, verb)
            protocol = next((each for each in remembering if isinstance(policy, each)), plain)
            kind: Any = type(policy)  # mypy takes no class for Hashable
            with placed(Value({}, f"{verb} policy of system {self.name}")):
                _check_attributes(kind, protocol)
                check_ranges(policy)
                _check_memory(verb, policy)

    @property
    def slots(self) -> dict[str, dict[str, Any]]:
        """Per verb, the policy's name and its parameters, under user-facing keys."""
        return {verb: _slot(verb, getattr(self.policies, verb)) for verb in VERBS}

    @property
    def parameters(self) -> tuple[str, ...]:
        """The keys of the scale policy, which a user may write besides the verbs; of an overseer, all that he may."""
        return keys_of(type(self.overseer or self.policies.scale))

    @property
    def resizes(self) -> bool:
        """Whether any of the systems that may decide changes the cores of replicas in place."""
        return any(each.scale.resizes for each in (self.policies, *self.choices.values()))

    def fresh(self, declared: Declared | None = None) -> "System":
        """A copy with fresh policy state, in which the declared parameters and policies replace the system's.

        A key that is a verb replaces that policy (`batch: slack`, `drop: {name: age, limit: 3}`) or, without a name,
        changes its parameters (`drop: {limit: 3}`); every other key is a parameter of the scale policy. Raises
        `InputError` at its place for an unknown key, policy or value.
        """
        value = as_value({} if declared is None else declared)
        if self.overseer is not None:
            return replace(self, overseer=adjust(self.overseer, value))
        fields = value.mapping()
        if "share" in fields:
            what = "unknown key: how many batches run together on a device is decided by the batch policy"
            instead = "write `batch: hybrid` instead of `share: hybrid`, and leave `share: take_all` out"
            fields["share"].fail(what, f"{instead}; a log with it is replayed by the release that wrote it")
        policies = {verb: _declared_policy(verb, getattr(self.policies, verb), fields.get(verb)) for verb in VERBS}
        policies["scale"] = adjust(policies["scale"], value, also=VERBS)
        return replace(self, policies=Policies(**policies))


@cache
def _check_attributes(kind: Any, protocol: Any) -> None:  # noqa: ANN401  # classes; mypy takes none for Hashable
    """InputError for a class that lacks an attribute of the protocol, or has a public one that is none of it.

    A parameter without a default would have the protocol's property as its value, because dataclasses take what the
    class has under that name for the default.
    """
    known = {name for name in (*dir(protocol), *protocol.__annotations__) if not name.startswith("_")}
    options = {field.name: field.default for field in fields(kind)} if is_dataclass(kind) else {}
    for name in sorted(known):
        if isinstance(options.get(name), property) or not (name in options or hasattr(kind, name)):
            what, base = f"{kind.__name__} has no value for {name!r}", protocol.__name__
            raise InputError(what, help=f"set it; or inherit the default, if it has one: class {kind.__name__}({base})")
    own = [base for base in kind.__mro__ if base.__module__ not in ("abc", "builtins", "typing", protocol.__module__)]
    for name in (name for base in own for name in vars(base)):
        if not name.startswith("_") and name not in known and name not in options:
            hint = nearest(name, known)
            what = f"{kind.__name__}.{name} is no parameter, and nobody reads it"
            raise InputError(what, help=f"{hint}; what only the class itself uses is _{name}")


def _check_memory(verb: str, policy: object) -> None:
    """InputError for a policy that keeps what it remembers in itself, as all did before they were given a memory."""
    name = type(policy).__name__
    kept = [field.name for field in fields(policy) if not field.init] if is_dataclass(policy) else []
    if kept:
        what = f"{name} keeps {listed(kept)} besides its parameters"
        raise InputError(what, help="answer with it as the memory, which is given with the next question")
    if verb == "scale" and len(inspect.signature(getattr(policy, "plan")).parameters) != PLAN_ARGUMENTS:  # noqa: B009
        what = f"{name}.plan must have the arguments now_ns, view and memory"
        raise InputError(what, help=NO_PAIR)


MEANINGS: Final = {
    "batch_max": "The largest batch of a replica.",
    "cores": "Of each replica.",
    "cores_max": "The most cores of a replica.",
    "hardware": "The kind of node to use; empty: the first kind on which every stage has a profile.",
    "headroom": "Plan for the demand times 1 + `headroom`.",
    "initial_rps": "The rate to expect before any request has come.",
    "margin": "Fraction of every deadline to plan with.",
    "period_ms": "How often it plans.",
    "replicas": "Of each stage.",
    "replicas_max": "The most replicas of a stage.",
    "replicas_min": "The fewest replicas of a stage.",
    "unit": "Cores are a multiple of this.",
    "variant": "The variant of every stage; empty: the first.",
}
"""What parameters mean that many scale policies have, where a policy says nothing else."""


@dataclass(frozen=True, slots=True)
class SystemParameter:
    """A parameter that users may write under `system`, with the value that the system gives it."""

    verb: str
    policy: str
    key: str
    """As it is written: the parameters of the scale policy directly under `system`, others under their verb."""
    default: Any
    range: str
    """Of its numbers, in words; empty without one."""
    meaning: str
    """From the policy's source, else that of the name (`MEANINGS`)."""


def parameters_of(system: System) -> tuple[SystemParameter, ...]:
    """All parameters of a system: those of its overseer, or of all its policies, those of its scale policy first."""
    if system.overseer is not None:
        return tuple(_parameters("overseer", system.name, system.overseer))
    found = list(_parameters("scale", _slot("scale", system.policies.scale)["name"], system.policies.scale))
    for verb in VERBS:
        if verb != "scale":
            policy = getattr(system.policies, verb)
            found += _parameters(verb, _slot(verb, policy)["name"], policy, f"{verb}.")
    return tuple(found)


def _parameters(verb: str, name: str, policy: object, prefix: str = "") -> Iterator[SystemParameter]:
    kind: Any = type(policy)  # mypy takes no class for Hashable
    meanings, ranges = _meanings(kind), ranges_of(kind)
    for key, default in written(policy).items():
        meaning = meanings.get(key) or meanings.get(f"{key.removesuffix('_ms')}_ns") or MEANINGS.get(key, "")
        yield SystemParameter(verb, name, f"{prefix}{key}", default, ranges.get(key, ""), meaning)


@cache
def _meanings(kind: type) -> Mapping[str, str]:
    """What a class says of its fields: the text after each, as one line. Empty without the source."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            continue
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for declared, text in pairwise(body):
            if isinstance(declared, ast.AnnAssign) and isinstance(declared.target, ast.Name):
                is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
                said = text.value.value if is_text and isinstance(text.value.value, str) else ""  # type: ignore[attr-defined]
                found[declared.target.id] = " ".join(said.split()).replace("_ns`", "_ms`")
    return found


def _slot(verb: str, policy: object) -> dict[str, Any]:
    return {"name": POLICIES[verb].name_of(type(policy)) or type(policy).__name__, **written(policy)}


def _declared_policy(verb: str, default: object, value: Value | None) -> Any:  # noqa: ANN401  # of that verb
    """The policy declared for one verb, or `default` with fresh state and the declared parameters."""
    if value is None:
        return adjust(default, {})
    if isinstance(value.content, str):
        return read_options(value.entry(POLICIES[verb], f"{verb} policy"), {})
    if not isinstance(value.content, Mapping):
        value.wrong("a policy's name or a mapping", f"write `{verb}: NAME` or `{verb}: {{name: NAME, …}}`")
    fields = value.mapping()
    if "name" not in fields:
        return adjust(default, value)
    return read_options(fields["name"].entry(POLICIES[verb], f"{verb} policy"), value, also=("name",))


def is_system_file(name: str) -> bool:
    """Whether a system's name is the path of a user's Python file."""
    return name.endswith(".py")


def system_in_file(name: str) -> System:
    """The system in a user's Python file, which is executed once. InputError if it defines none."""
    found = getattr(module_in(Path(name)), "SYSTEM", None)
    if not isinstance(found, System) or not isinstance(found.policies, Policies):
        what = "it has no SYSTEM" if found is None else f"its SYSTEM is a {type(found).__name__}, not a System"
        fix = "end it with SYSTEM = System(name=…, kind='system', source=…, policies=Policies(…))"
        raise InputError(what, where=name, help=fix)
    return found
