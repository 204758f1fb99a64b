"""Snapshots: the state of a core and of its fold as data, from which another process goes on as they would have.

A segment of a server's event log begins with one, so that a replay can start there. What follows from the definitions
of the applications (graphs, profiles, parameters of policies) is not in it: it is built again, and the snapshot refers
to it by name. The rest is written field by field, with shared and cyclic references. It is no pickle: reading it makes
only values, containers, and objects of sloop's classes and of those beside the application's policies, and runs no code
that the snapshot names.

What is `Transient` is written as its class alone, and read as a new object of it. What cannot be saved is refused with
the path of fields that leads to it: a closure, an open file, an object of a class from elsewhere.
"""

import math
import re
import sys
from array import array
from base64 import b64decode, b64encode
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum, EnumType
from importlib import import_module
from itertools import count
from types import FunctionType, MethodType, NoneType
from typing import Any, Final

import msgspec
import numpy as np
from msgspec import Struct

from sloop import actions, events, sizes, vocabulary
from sloop.core import ApplicationParts, Core
from sloop.core.protocols import Policies
from sloop.core.views import Bucket, CoreDemand, DeviceView, ReplicaView
from sloop.errors import InputError, SloopError
from sloop.profile.estimate import Estimate
from sloop.profile.size_law import SizeLessons
from sloop.runlog.fold import DeploymentState
from sloop.systems.system import VERBS
from sloop.transient import Transient

FORMAT: Final = 1
"""Of the snapshot's encoding. The fields of classes are compared one by one when it is read."""
MODULES: Final = (
    "sloop.core",
    "sloop.policies",
    "sloop.solvers",
    "sloop.profile.estimate",
    "sloop.profile.interference",
    "sloop.profile.size_law",
    "sloop.transient",
    "sloop.runlog",
    "sloop.app.graph",
    "sloop.app.progress",
    "sloop.vocabulary",
    "sloop.actions",
    "sloop.events",
)
"""Objects of classes in these modules, and below them, can be saved, and those of the package with a user's policy."""
JSON_INT: Final = 2**63
"""Larger integers, such as an exact sum of prices, are written as text."""
PLAIN: Final = frozenset({int, str, bool, NoneType})
VALUES: Final = frozenset(
    kind
    for module in (vocabulary, actions, events, sizes)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Struct) and kind is not Struct
) | {Bucket, ReplicaView, DeviceView, CoreDemand, SizeLessons}
"""Structs of plain values, which msgspec writes whole: a core has hundreds of thousands of them."""
OWNED: Final = frozenset({vocabulary.Visit, Bucket})
"""Those of them that change. Each belongs to one container; a second one would get a copy, and is refused."""

BUILT_IN: Final[dict[type, str]] = {kind: kind.__name__ for kind in (int, float, str, list, dict, set, tuple)}
"""What a `defaultdict` may call for a missing value, besides functions of sloop's own."""

Externals = Sequence[tuple[str, object]]
"""Objects that writer and reader both have, with their names."""
Tree = Any
"""What JSON can hold. A list begins with a tag that says what it stands for (see `_TreeWriter`)."""


REPORT: Final = "report this: the log goes on without the snapshot"


class SnapshotError(SloopError):
    """Something cannot be saved. `what` begins with the path of fields that leads to it."""


class Snapshot(Struct, frozen=True):
    """The state of a run at one instant. `save` makes it, `restore` reads it; JSON can hold it."""

    format: int
    at_ns: int
    classes: list[tuple[str, list[str]]]
    """The classes of the objects, each with the fields that are saved; trees refer to them by position."""
    core: Any
    planner: Any = None
    """What the policies of a planner process remember; None if the core's own policies make the plans."""
    fold: Any = None


def externals_of(
    parts: Iterable[ApplicationParts], build: Callable[..., Any] | None = None
) -> list[tuple[str, object]]:
    """What follows from the definitions of application versions, with names. A version that was deployed again has the
    names of the earlier one."""
    found: list[tuple[str, object]] = [("build", build)] if build is not None else []
    for each in parts:
        key = each.key
        found += [(f"{key}/parts", each), (f"{key}/graph", each.graph), (f"{key}/beliefs", each.beliefs)]
        found.append((f"{key}/policies", each.policies))
        for at, belief in enumerate(each.beliefs.values()):
            found.append((f"{key}/belief{at}", belief))
            if isinstance(belief, Estimate):
                found.append((f"{key}/belief{at}/profile", belief.profile))
        found += _policies(key, each.policies)
        if each.overseer is not None:
            found += [*_policy(f"{key}/overseer", each.overseer), (f"{key}/choices", each.choices)]
        for choice, policies in each.choices.items():
            found += [(f"{key}/choice/{choice}", policies), *_policies(f"{key}/choice/{choice}", policies)]
    return found


def _policies(name: str, policies: Policies) -> list[tuple[str, object]]:
    return [each for verb in VERBS for each in _policy(f"{name}/{verb}", getattr(policies, verb))]


def _policy(name: str, policy: object) -> list[tuple[str, object]]:
    """A policy, and those that it is made of."""
    found = [(name, policy)]
    if is_dataclass(policy):
        for field in fields(policy):
            if field.init and is_dataclass(part := getattr(policy, field.name)) and not isinstance(part, type):
                found += _policy(f"{name}.{field.name}", part)
    return found


def _has_state(name: str) -> bool:
    """Whether an external's own fields are saved too: those of beliefs."""
    return re.fullmatch(r".*/belief\d+", name) is not None


def _slots_of(kind: type) -> tuple[str, ...]:
    names = [name for base in reversed(kind.__mro__) for name in _as_tuple(base.__dict__.get("__slots__", ()))]
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _fields_of(value: object) -> list[str]:
    """The fields that an object has, of a class that is no struct."""
    return [*(name for name in _slots_of(type(value)) if hasattr(value, name)), *getattr(value, "__dict__", ())]


def _as_tuple(slots: str | Iterable[str]) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _is_within(module: str, modules: Iterable[str]) -> bool:
    return any(module == own or module.startswith(f"{own}.") for own in modules)


def _modules_of(externals: Externals) -> tuple[str, ...]:
    """The modules whose classes and functions a snapshot may name: `MODULES`, and where users' policies come from: the
    package around the module, or the module if it is in none."""
    users = {type(each).__module__ for _, each in externals if is_dataclass(each)}
    return (*MODULES, *(module.rpartition(".")[0] or module for module in users if not _is_within(module, MODULES)))


def _name_of(kind: type | FunctionType) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


class _TreeWriter:
    """Turns objects into a tree. Plain values stand for themselves; everything else is a list that begins with a tag:
    `@` an object that came before, by its number; `x`, `X` an external, without and with its state; `o` an object;
    `v`, `V` values; `m` a method, and so on. Objects are numbered in the order in which they are met.
    """

    def __init__(self, externals: Externals, classes: list[tuple[str, list[str]]]) -> None:
        self._names = {id(each): name for name, each in reversed(externals)}
        self._classes = classes
        self._modules = _modules_of(externals)
        self._numbers: dict[int, int] = {}
        self._owned: set[int] = set()
        self._indices: dict[tuple[type, tuple[str, ...]], int] = {}
        """By class and saved fields, the position in `Snapshot.classes`."""
        self._writers: dict[type, Callable[[Any], Tree]] = {
            float: lambda value: value if math.isfinite(value) else ["f", repr(value)],
            tuple: lambda value: ["t", *self._contents(value)],
            frozenset: lambda value: ["z", *map(self.write, value)],
            bytes: lambda value: ["b", b64encode(value).decode()],
            list: lambda value: self._met(value) or ["l", *self._contents(value)],
            set: lambda value: self._met(value) or ["s", *map(self.write, value)],
            deque: lambda value: self._met(value) or ["q", value.maxlen, *self._contents(value)],
            dict: lambda value: self._met(value) or ["d", *self._pairs(value)],
            OrderedDict: lambda value: self._met(value) or ["od", *self._pairs(value)],
            Counter: lambda value: self._met(value) or ["c", *self._pairs(value)],
            defaultdict: lambda value: (
                self._met(value) or ["dd", self.write(value.default_factory), *self._pairs(value)]
            ),
            array: lambda value: self._met(value) or ["a", value.typecode, value.tolist()],
            count: lambda value: self._met(value) or ["it", value.__reduce__()[1][0]],
            np.ndarray: lambda value: self._met(value) or _array(value),
            MethodType: lambda value: ["m", self.write(value.__self__), value.__func__.__name__],
            FunctionType: self._function,
        }

    def write(self, value: Any) -> Tree:  # noqa: ANN401, PLR0911  # any object of a core; one return for each kind
        """The tree of one value. SnapshotError if it cannot be saved."""
        kind = type(value)
        if kind in PLAIN:
            return value if kind is not int or -JSON_INT <= value < JSON_INT else ["i", str(value)]
        name = self._names.get(id(value))
        if name is not None and not _has_state(name):
            return ["x", name]
        writer = self._writers.get(kind)
        if writer is not None:
            return writer(value)
        if kind in VALUES:
            self._own(kind, (value,))
            return ["v", kind.__name__, value]
        if isinstance(value, Enum):
            return ["e", self._class_name(kind), value.value]
        if isinstance(value, type):
            return ["k", BUILT_IN.get(value) or self._class_name(value)]
        if isinstance(value, np.generic):
            return [*_array(np.asarray(value)), 0]
        return self._object(value, name)

    def _met(self, value: object) -> Tree:
        """A reference to an object that came before; None for a new one, which gets the next number."""
        number = self._numbers.get(id(value))
        if number is not None:
            return ["@", number]
        self._numbers[id(value)] = len(self._numbers)
        return None

    def _own(self, kind: type, values: Iterable[object]) -> None:
        """Refuse a value that changes and is in two places."""
        if kind in OWNED:
            found = set(map(id, values))
            if not self._owned.isdisjoint(found):
                raise SnapshotError(f": a {kind.__name__} is in two places", help=REPORT)
            self._owned |= found

    def _contents(self, values: Sequence[Any]) -> list[Tree]:
        """The members of a sequence; if all are values of one class, it is written as a whole."""
        kinds = set(map(type, values))
        if len(kinds) == 1 and (kind := next(iter(kinds))) in VALUES:
            self._own(kind, values)
            return [["V", kind.__name__, list(values)]]
        if kinds <= PLAIN:
            return list(values)
        return [self._at(f"[{place}]", value) for place, value in enumerate(values)]

    def _pairs(self, values: Mapping[Any, Any]) -> list[Tree]:
        write = self.write
        found: list[Tree] = []
        for key, value in values.items():
            found += (write(key), self._at(f"[{key!r}]", value))
        return found

    def _at(self, place: str, value: object) -> Tree:
        try:
            return self.write(value)
        except SnapshotError as error:
            raise SnapshotError(f"{place}{error.what}", help=error.help) from None

    def _object(self, value: object, name: str | None) -> Tree:
        """An object of a class, or an external with its state."""
        met = self._met(value)
        if met is not None:
            return met
        kind = type(value)
        if name is None and not _is_within(kind.__module__, self._modules):
            raise SnapshotError(f" is a {_name_of(kind)}, which cannot be saved", help=REPORT)
        names = self._saved(value, is_external=name is not None)
        index = self._indices.get((kind, names))
        if index is None:
            self._indices[kind, names] = index = len(self._classes)
            self._classes.append((_name_of(kind), list(names)))
        tags = ["X", name] if name is not None else ["o"]
        return [*tags, index, *[self._at(f".{each}", getattr(value, each)) for each in names]]

    def _saved(self, value: object, *, is_external: bool) -> tuple[str, ...]:
        """The fields that a snapshot keeps of an object. Of a belief that is a dataclass, these are those that are no
        parameters, which follow from its definition."""
        names: Iterable[str]
        if isinstance(value, Transient):
            return ()
        if is_external and is_dataclass(value):
            names = [field.name for field in fields(value) if not field.init]
        else:
            names = value.__struct_fields__ if isinstance(value, Struct) else _fields_of(value)
        return tuple(names)

    def _class_name(self, kind: type) -> str:
        if not _is_within(kind.__module__, self._modules):
            raise SnapshotError(f" is or has class {_name_of(kind)}, which cannot be saved", help=REPORT)
        return _name_of(kind)

    def _function(self, value: FunctionType) -> Tree:
        module = value.__module__
        is_own = _is_within(module, self._modules)
        if not is_own or getattr(sys.modules[module], value.__qualname__, None) is not value:
            raise SnapshotError(f" is the function {_name_of(value)}, which cannot be saved", help=REPORT)
        return ["fn", _name_of(value)]


def _array(value: "np.ndarray[Any, Any]") -> Tree:
    if value.dtype.hasobject:
        raise SnapshotError(f" is an array of {value.dtype}, which cannot be saved", help=REPORT)
    return ["n", value.dtype.str, list(value.shape), b64encode(value.tobytes()).decode()]


class _TreeReader:
    """Turns a tree back into objects: the inverse of `_TreeWriter`."""

    def __init__(self, externals: Externals, classes: Sequence[tuple[str, list[str]]]) -> None:
        self._externals = dict(externals)
        self._classes = classes
        self._modules = _modules_of(externals)
        self._types = [self._found(name) if self._is_allowed(name) else None for name, _ in classes]
        self._met: list[Any] = []
        self._values = {kind.__name__: kind for kind in VALUES}
        self._lists = {kind.__name__: list[kind] for kind in VALUES}  # type: ignore[valid-type]  # made at run time
        self._readers: dict[str, Callable[[list[Any]], Any]] = {
            "f": lambda tree: float(tree[1]),
            "i": lambda tree: int(tree[1]),
            "t": lambda tree: tuple(self._contents(tree, 1)),
            "z": lambda tree: frozenset(map(self.read, tree[1:])),
            "b": lambda tree: b64decode(tree[1]),
            "e": lambda tree: self._found(tree[1], EnumType)(tree[2]),
            "k": lambda tree: (
                next((kind for kind, name in BUILT_IN.items() if name == tree[1]), None) or self._found(tree[1])
            ),
            "fn": lambda tree: self._found(tree[1], FunctionType),
            "@": lambda tree: self._before(tree[1]),
            "x": lambda tree: self._external(tree[1]),
            "v": lambda tree: msgspec.convert(tree[2], self._values[tree[1]]),
            "m": self._method,
            "l": lambda tree: self._fill([], lambda made: made.extend(self._contents(tree, 1))),
            "s": lambda tree: self._fill(set(), lambda made: made.update(map(self.read, tree[1:]))),
            "q": lambda tree: self._fill(deque(maxlen=tree[1]), lambda made: made.extend(self._contents(tree, 2))),
            "d": lambda tree: self._fill({}, lambda made: made.update(self._pairs(tree, 1))),
            "od": lambda tree: self._fill(OrderedDict(), lambda made: made.update(self._pairs(tree, 1))),
            "c": lambda tree: self._fill(Counter(), lambda made: made.update(dict(self._pairs(tree, 1)))),
            "dd": self._default_dict,
            "a": lambda tree: self._fill(array(tree[1], tree[2])),
            "it": lambda tree: self._fill(count(tree[1])),
            "n": self._numpy,
            "o": lambda tree: self._object(tree, 1, None),
            "X": lambda tree: self._object(tree, 2, self._external(tree[1])),
        }

    def read(self, tree: Tree) -> Any:  # noqa: ANN401  # any object of a core
        """The value of a tree."""
        return self._readers[tree[0]](tree) if type(tree) is list else tree

    def _contents(self, tree: list[Any], first: int) -> Iterable[Any]:
        if len(tree) == first + 1 and type(tree[first]) is list and tree[first][0] == "V":
            _, name, values = tree[first]
            found: list[Any] = msgspec.convert(values, self._lists[name])
            return found
        read = self.read
        return [read(each) for each in tree[first:]]

    def _pairs(self, tree: list[Any], first: int) -> Iterable[tuple[Any, Any]]:
        read = self.read
        return [(read(tree[at]), read(tree[at + 1])) for at in range(first, len(tree), 2)]

    def _fill(self, made: Any, fill: Callable[[Any], None] = lambda _: None) -> Any:  # noqa: ANN401
        """Give a container its number, then its contents, which may refer to it."""
        self._met.append(made)
        fill(made)
        return made

    def _default_dict(self, tree: list[Any]) -> Any:  # noqa: ANN401
        made: defaultdict[Any, Any] = defaultdict()
        self._met.append(made)
        made.default_factory = self.read(tree[1])
        made.update(self._pairs(tree, 2))
        return made

    def _numpy(self, tree: list[Any]) -> Any:  # noqa: ANN401
        made = np.frombuffer(b64decode(tree[3]), dtype=np.dtype(tree[1])).reshape(tree[2]).copy()
        return made[()] if len(tree) > 4 else self._fill(made)

    def _before(self, number: int) -> Any:  # noqa: ANN401
        found = self._met[number]
        if found is _UNFINISHED:
            raise SnapshotError(": a struct contains itself", help=REPORT)
        return found

    def _external(self, name: str) -> Any:  # noqa: ANN401
        if name not in self._externals:
            raise SnapshotError(f" refers to {name!r}, which the definitions do not have", help=REPORT)
        return self._externals[name]

    def _method(self, tree: list[Any]) -> Any:  # noqa: ANN401
        made = self.read(tree[1])
        if not isinstance(getattr(type(made), tree[2], None), FunctionType):
            raise SnapshotError(f": {type(made).__name__} has no method {tree[2]!r}", help=REPORT)
        return getattr(made, tree[2])

    def _object(self, tree: list[Any], first: int, made: Any) -> Any:  # noqa: ANN401
        """An object of a class. `made` exists already: only its state is set."""
        index = tree[first]
        name, names = self._classes[index]
        values = tree[first + 1 :]
        kind = type(made) if made is not None else self._types[index]
        if kind is None or _name_of(kind) != name:
            raise SnapshotError(f": {name} is not a class that a snapshot may have", help=REPORT)
        if issubclass(kind, Struct):
            number = len(self._met)
            self._met.append(_UNFINISHED)
            self._met[number] = made = kind(**dict(zip(names, map(self.read, values), strict=True)))
            return made
        if made is None:
            made = kind() if issubclass(kind, Transient) else object.__new__(kind)
        self._met.append(made)
        slots = _slots_of(kind)
        for each, value in zip(names, values, strict=True):
            if each not in slots and not hasattr(made, "__dict__"):
                raise SnapshotError(f": {name} has no field {each!r}", help=REPORT)
            object.__setattr__(made, each, self.read(value))
        return made

    def _is_allowed(self, name: str) -> bool:
        return _is_within(name.partition(":")[0], self._modules)

    def _found(self, name: str, kind: type = type) -> Any:  # noqa: ANN401  # a class, or a function
        """The class or function with this name."""
        module, _, qualified = name.partition(":")
        found = getattr(import_module(module), qualified, None) if self._is_allowed(name) else None
        if not isinstance(found, kind) or found.__module__ != module:
            raise SnapshotError(f": {name} is not something that a snapshot may have", help=REPORT)
        return found


_UNFINISHED: Final = object()


# A run


def save(core: Core, at_ns: int, *, fold: DeploymentState | None = None, planner: Snapshot | None = None) -> Snapshot:
    """The state of a run at `at_ns`, between two events. `planner` is that of the planner process (`save_planner`).

    SnapshotError if something in it cannot be saved, or if a plan was requested and is not answered.
    """
    if core.plan_input is not None:
        raise SnapshotError("core.plan_input: a plan is being made", help="save it when the plan has arrived")
    classes: list[tuple[str, list[str]]] = []
    parts = [each.parts for each in core.state.applications.values()]
    writer = _TreeWriter(externals_of(parts, core.build), classes)
    tree = writer.write(core)
    folded = None
    if fold is not None:
        own: list[Any] = [each.parts for each in fold.records]
        folded = _TreeWriter(externals_of(own, fold.build), classes).write(fold)
    plans = None if planner is None else msgspec.to_builtins(planner)
    return Snapshot(FORMAT, at_ns, classes, tree, plans, folded)


def save_memories(parts: Iterable[ApplicationParts], memories: Mapping[str, Any], at_ns: int = 0) -> Snapshot:
    """What a planner's policies remember, by key. `parts` are those that they belong to."""
    classes: list[tuple[str, list[str]]] = []
    return Snapshot(FORMAT, at_ns, classes, _TreeWriter(externals_of(parts), classes).write(dict(memories)))


def restore(
    snapshot: Snapshot, parts: Sequence[ApplicationParts], build: Callable[..., Any]
) -> tuple[Core, DeploymentState | None]:
    """The core and the fold of a snapshot. `parts` are those of all application versions, fresh; they are changed.

    InputError if the snapshot was written by a sloop whose classes differ, or is damaged.
    """
    externals = externals_of(parts, build)
    try:
        if snapshot.format != FORMAT:
            raise SnapshotError(f": it has format {snapshot.format}", help=REPORT)
        reader = _TreeReader(externals, snapshot.classes)
        core = reader.read(snapshot.core)
        if snapshot.planner is not None:
            own = msgspec.convert(snapshot.planner, Snapshot)
            reader = _TreeReader(externals, own.classes)
            core.planner.adopt(reader.read(own.core))
        fold = None
        if snapshot.fold is not None:
            reader = _TreeReader(externals, snapshot.classes)
            fold = reader.read(snapshot.fold)
    except (SnapshotError, ValueError, TypeError, KeyError, IndexError, AttributeError, ImportError) as error:
        raise InputError(
            f"the snapshot cannot be read: {error}",
            help="read the log with the release of sloop that wrote it (its header names it)",
        ) from error
    return core, fold
