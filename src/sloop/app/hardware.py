"""Hardware: the resources and price of each kind of node, the local machine, and the clusters that users declare.

Every price names its source. Only `local` and `foreign_profiles` read the local machine.

Sources: prices and instance types of Ribbon (Li et al., SC 2021, price list of its artefact) and of Paldia (Table II);
cores, memory and memory of the accelerators as Amazon lists them for those types; clients of an accelerator as NVIDIA's
documentation of MPS (48 since Volta, 16 before); power of accelerators as NVIDIA's data sheets; the machine of
Flashpoint's evaluation (San Juan, thesis, Waterloo 2023, chapters 3 and 8). The power of whole nodes was not published
for any of them; it is assumed (specification of Paldia, section 5.6).
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from msgspec import structs

from sloop.app.application import Application
from sloop.app.document import check_unique, existing_file, read_name, read_yaml
from sloop.machine import capacity, processor
from sloop.options import NonNegativeInt, OutOfRange, Range, Value, read_options
from sloop.text import counted, listed
from sloop.units import GIB
from sloop.vocabulary import Device, Node

LOCAL, CUSTOM = "local", "custom"
ACQUIRE_S: Final = 60.0
"""Seconds from the order of a node on demand until it can start replicas. Assumed for every kind: no source measured
all of them. Studies of EC2 found one to two minutes, and Amazon's newer images boot faster."""
ANY_BYTES = 1 << 62
"""The memory of a node with unknown memory: so large that every replica fits."""
NODES_MAX: Final = 100_000

Kinds = Mapping[str, frozenset[str]]
"""Kinds of hardware, each with the kinds of its accelerators."""

_RIBBON = "EC2 on demand, us-east-1, as listed by Ribbon (SC 2021)"
_PALDIA = "EC2 on demand, us-east-1, as listed by Paldia (Table II)"
_FLASHPOINT = "Lambda Labs, one A10, as described by Flashpoint (San Juan, thesis, Waterloo 2023); no price"
HOST_W: Final = 25.0
"""Of the host of a node with one accelerator, assumed."""


@dataclass(frozen=True, slots=True)
class Power:
    """What a node draws, in watts: at rest, and with all its cores and accelerators busy. In between, in proportion."""

    idle_w: float
    max_w: float
    origin: Literal["declared", "measured", "published", "assumed"] = "assumed"

    def watts(self, busy: float) -> float:
        """At this busy part of the time, 0 to 1."""
        return self.idle_w + min(1.0, max(0.0, busy)) * (self.max_w - self.idle_w)


@dataclass(frozen=True, slots=True)
class HardwareKind:
    """A kind of node: virtual cores, memory, accelerators, its on-demand price and the source of all of them."""

    name: str
    cores: float
    memory_bytes: int
    devices: tuple[Device, ...] = ()
    usd_per_h: float = 0.0
    source: str = ""
    acquire_s: float = ACQUIRE_S
    """Seconds until a node on demand can start replicas."""
    power: Power | None = None
    """None if it is unknown."""

    def node(self, name: str) -> Node:
        """One node of this kind. It carries what only the kind's user knows of it."""
        made = Node(name, self.name, self.cores, self.memory_bytes, self.devices, self.usd_per_h)
        if self.name in KINDS:
            return made
        power_w = (self.power.idle_w, self.power.max_w) if self.power is not None else None
        return structs.replace(made, acquire_s=None if self.acquire_s == ACQUIRE_S else self.acquire_s, power_w=power_w)


ACCELERATORS: dict[str, Device] = {
    device.kind: device
    for device in (
        Device("M60", "M60", 8 * GIB, clients_max=16),
        Device("K80", "K80", 12 * GIB, clients_max=16),
        Device("T4", "T4", 16 * GIB),
        Device("V100", "V100", 16 * GIB),
        Device("P40", "P40", 24 * GIB, clients_max=16),
        Device("A10", "A10", 24 * GIB),
        Device("A100", "A100", 40 * GIB),
        Device("H100", "H100", 80 * GIB),
    )
}
"""Accelerators by kind: one GPU as EC2 rents it, which of the M60 and the K80 is half a board."""


def _gpu_power(idle_w: float, max_w: float) -> Power:
    """Of a node with one accelerator, whose power limit is `max_w` and half of its board's if it is half a board, and
    its host."""
    return Power(idle_w + HOST_W, max_w + HOST_W)


def _kind(
    name: str,
    cores: int,
    memory_gib: float,
    usd_per_h: float,
    device: str = "",
    source: str = _RIBBON,
    power: Power | None = None,
) -> HardwareKind:
    devices = (ACCELERATORS[device],) if device else ()
    return HardwareKind(name, cores, int(memory_gib * GIB), devices, usd_per_h, source, power=power)


KINDS: dict[str, HardwareKind] = {
    kind.name: kind
    for kind in (
        _kind("c4.2xlarge", 8, 15, 0.398),
        _kind("c4.4xlarge", 16, 30, 0.796),
        _kind("c5.2xlarge", 8, 16, 0.34),
        _kind("c5.4xlarge", 16, 32, 0.68),
        _kind("c5a.2xlarge", 8, 16, 0.308),
        _kind("c5a.4xlarge", 16, 32, 0.616),
        _kind("c5n.2xlarge", 8, 21, 0.432),
        _kind("c5n.4xlarge", 16, 42, 0.864),
        _kind("c6i.2xlarge", 8, 16, 0.34, source=_PALDIA, power=Power(25, 70)),
        _kind("c6i.4xlarge", 16, 32, 0.68, source=_PALDIA, power=Power(45, 130)),
        _kind("m4.xlarge", 4, 16, 0.20, power=Power(20, 45)),
        _kind("m4.2xlarge", 8, 32, 0.40),
        _kind("m5.xlarge", 4, 16, 0.192),
        _kind("m5.2xlarge", 8, 32, 0.384),
        _kind("m5a.xlarge", 4, 16, 0.172),
        _kind("m5a.2xlarge", 8, 32, 0.344),
        _kind("m5n.xlarge", 4, 16, 0.238),
        _kind("m5n.2xlarge", 8, 32, 0.476),
        _kind("r4.large", 2, 15.25, 0.133),
        _kind("r4.xlarge", 4, 30.5, 0.266),
        _kind("r5.large", 2, 16, 0.126),
        _kind("r5.xlarge", 4, 32, 0.252),
        _kind("r5a.large", 2, 16, 0.113),
        _kind("r5a.xlarge", 4, 32, 0.226),
        _kind("r5n.large", 2, 16, 0.149),
        _kind("r5n.xlarge", 4, 32, 0.298),
        _kind("t2.xlarge", 4, 16, 0.1856),
        _kind("t2.2xlarge", 8, 32, 0.3712),
        _kind("t3.xlarge", 4, 16, 0.1664),
        _kind("t3.2xlarge", 8, 32, 0.3328),
        _kind("t3a.xlarge", 4, 16, 0.1504),
        _kind("t3a.2xlarge", 8, 32, 0.3008),
        _kind("g3s.xlarge", 4, 30.5, 0.75, "M60", source=_PALDIA, power=_gpu_power(30, 150)),
        _kind("g4dn.xlarge", 4, 16, 0.526, "T4"),
        _kind("g4dn.2xlarge", 8, 32, 0.752, "T4"),
        _kind("p2.xlarge", 4, 61, 0.90, "K80", power=_gpu_power(35, 150)),
        _kind("p3.2xlarge", 8, 61, 3.06, "V100", power=_gpu_power(40, 300)),
        _kind("lambda.a10", 30, 200, 0.0, "A10", source=_FLASHPOINT),
    )
}
"""Kinds to rent by name, without `local` and `custom`. That of Flashpoint was printed without a price."""

EDGE_CORES: Final = 2
"""With fewer, the edge, the process that decides, and the replicas share a core."""


def local() -> HardwareKind:
    """The local machine: the cores and the memory that this process may use, no price."""
    here = capacity()
    memory_bytes = ANY_BYTES if here.memory_bytes is None else here.memory_bytes
    source = f"this machine, limited to {here.limits}" if here.limits else "this machine"
    return HardwareKind(LOCAL, here.cores, memory_bytes, source=source)


def local_limit(nodes: Iterable[Node], what: str) -> str:
    """How a control group limits the `cores` or the `memory` of this machine, and where, if one of the nodes is this
    machine; otherwise empty."""
    if what not in ("cores", "memory") or all(node.hardware != LOCAL for node in nodes):
        return ""
    return capacity().cores_limit if what == "cores" else capacity().memory_limit


def known_kinds() -> tuple[str, ...]:
    """Every value that a node's `hardware` may have."""
    return (LOCAL, CUSTOM, *KINDS)


def accelerators_of(hardware: str) -> frozenset[str] | None:
    """The kinds of accelerators of a known kind of hardware; None if nothing is known of it."""
    return frozenset(each.kind for each in KINDS[hardware].devices) if hardware in KINDS else None


def power_of(node: Node) -> Power | None:
    """What a node draws; None if it is unknown."""
    if node.power_w is not None:
        return Power(*node.power_w, origin="declared")
    return KINDS[node.hardware].power if node.hardware in KINDS else None


def acquire_s(node: Node) -> float:
    """Seconds until a node on demand can start replicas."""
    if node.acquire_s is not None:
        return node.acquire_s
    return KINDS[node.hardware].acquire_s if node.hardware in KINDS else ACQUIRE_S


def unpriced(nodes: Iterable[Node]) -> tuple[str, ...]:
    """The hardware of those nodes that have no price, each once."""
    return tuple(dict.fromkeys(node.hardware for node in nodes if not node.usd_per_h))


def shared_profiles(application: Application) -> tuple[str, ...]:
    """An assumption for each variant whose only profile is taken as its speed on several kinds of hardware."""
    found: list[str] = []
    for stage in application.stages:
        for variant in stage.variants:
            kinds = [kind for kind in application.profiles_of(variant) if kind not in variant.profiles]
            if len(kinds) > 1:
                what = f"one profile is taken as its speed on {listed(kinds)}; `profiles` can name one for each"
                found.append(f"{stage.name}/{variant.name}: {what}")
    return tuple(found)


def foreign_profiles(application: Application) -> tuple[str, ...]:
    """A warning for each variant whose profile was measured on another machine than this one, where that matters:
    on another processor, or where the server's own processes had other cores than the model's.

    Latencies of one processor are wrong for another; those of an accelerator are its own. Only clusters with `local`
    nodes are checked, because a cloud may use different processors for one instance type.
    """
    if not any(node.hardware == LOCAL for node in application.cluster):
        return ()
    here, cores, found = processor(), capacity().cores, list[str]()
    for stage in application.stages:
        for variant in stage.variants:
            profile = variant.on(LOCAL)
            if profile is None or profile.accelerator:
                continue
            there, cores_there = _machine_of(profile.hardware)
            if there not in ("", here):
                differs = f"its profile is of {there}, this machine has {here}"
            elif cores < min(EDGE_CORES, cores_there):
                differs = (
                    f"its profile was measured on {counted(cores_there, 'core')}, this machine has {cores:g}, "
                    "which the server's own processes need as well"
                )
            else:
                continue
            what = f"measure it here with `sloop profile {variant.model or 'MODEL'}`"
            found.append(f"{stage.name}/{variant.name}: {differs}; {what}")
    return tuple(found)


def _machine_of(hardware: str) -> tuple[str, float]:
    """The name of the processor in `sloop.machine.hardware_name`, without the kind of node that `sloop profile
    --hardware` puts before it, and the number of cores; 0 if it has none."""
    name, _, cores = re.sub(r"^[\w.-]+: ", "", hardware).rpartition(", ")
    match = re.fullmatch(r"(\d+(?:\.\d+)?) cores", cores)
    return (name, float(match[1])) if match else (re.sub(r"^[\w.-]+: ", "", hardware), 0.0)


# The cluster of an application or a deployment, as a user declares it.


@dataclass(frozen=True, slots=True)
class _NodeGroup:
    """The options of a group of equal nodes; the hardware kind gives the omitted ones."""

    hardware: str
    count: Annotated[int, Range(least=0, most=NODES_MAX)] = 1
    most: Annotated[int, Range(least=1, most=NODES_MAX)] | None = None
    """The nodes from `count` up to `most` are acquired when they are needed."""
    name: str = ""
    cores: Annotated[float, Range(above=0, most=1e6)] | None = None
    memory_bytes: NonNegativeInt | None = None
    devices: tuple[Device, ...] | None = None
    usd_per_h: Annotated[float, Range(least=0, most=1e6)] | None = None
    per_rack: Annotated[int, Range(least=1, most=NODES_MAX)] | None = None
    """How many nodes are at one switch, in the order of the cluster; without it, their racks are unknown."""


@dataclass(frozen=True, slots=True)
class _DeclaredDevice:
    """The options of an accelerator that is declared as a mapping."""

    kind: str
    memory_gib: Annotated[float, Range(above=0, most=1e6)]
    name: str = ""
    clients: Annotated[int, Range(least=1, most=1_000_000)] = 48


@dataclass(frozen=True, slots=True)
class _DeclaredKind:
    """The options of a kind of hardware of a user."""

    name: str
    cores: Annotated[float, Range(above=0, most=1e6)]
    memory_gib: Annotated[float, Range(above=0, most=1e6)] | None = None
    """Unknown without it: every replica fits."""
    devices: tuple[Device, ...] = ()
    usd_per_h: Annotated[float, Range(least=0, most=1e6)] = 0.0
    acquire_s: Annotated[float, Range(least=0, most=1e6)] = ACQUIRE_S
    """Seconds from the order of a node until it can start replicas."""
    idle_w: Annotated[float, Range(least=0, most=1e6)] | None = None
    """What a node draws at rest, in watts."""
    max_w: Annotated[float, Range(least=0, most=1e6)] | None = None
    """The same with all its cores and accelerators busy."""
    source: str = ""
    """Where the figures are from."""

    def __post_init__(self) -> None:
        """OutOfRange for power at work without that at rest, or the other way round, or below it."""
        if (self.idle_w is None) != (self.max_w is None):
            missing, given = ("idle_w", "max_w") if self.idle_w is None else ("max_w", "idle_w")
            raise OutOfRange(given, f"has no effect without `{missing}`", f"give `{missing}` too, or leave both out")
        if self.idle_w is not None and self.max_w is not None and self.max_w < self.idle_w:
            raise OutOfRange("max_w", f"must be at least `idle_w`, {self.idle_w:g}, not {self.max_w:g}")

    @property
    def power(self) -> Power | None:
        """None if it is unknown."""
        return None if self.idle_w is None or self.max_w is None else Power(self.idle_w, self.max_w, "declared")


def read_cluster(value: Value) -> tuple[Node, ...]:
    """The nodes under `cluster`, those on demand included. `kinds` has the user's own kinds of hardware, or the name of
    a file that has them."""
    fields = value.mapping(("nodes", "kinds"), required=("nodes",))
    kinds = _own_kinds(fields["kinds"]) if "kinds" in fields else {}
    groups = fields["nodes"]
    nodes: list[Node] = []
    for group in groups.elements():
        nodes += _nodes(group, kinds, taken=len(nodes))
    if not nodes:
        groups.wrong("at least one group of nodes", "for example [{hardware: local, count: 1}]")
    if len({node.name for node in nodes}) < len(nodes):
        groups.fail("two nodes have the same name", "give each group its own 'name'")
    return tuple(nodes)


def kinds_in(file: Path) -> dict[str, HardwareKind]:
    """The user's own kinds of hardware in a file, by name: a list of them, or a mapping with `kinds`."""
    return _own_kinds(_kinds_of_file(file))


def _kinds_of_file(file: Path) -> Value:
    value = read_yaml(file)
    return value.mapping(("kinds",), required=("kinds",))["kinds"] if isinstance(value.content, Mapping) else value


def _own_kinds(value: Value) -> dict[str, HardwareKind]:
    """The user's own kinds of hardware, by name."""
    if isinstance(value.content, str):
        folder = Path(value.file).parent if value.file else Path()
        value = _kinds_of_file(existing_file(value, folder, "file of hardware kinds"))
    found: dict[str, HardwareKind] = {}
    values = value.elements()
    for each in values:
        own = read_options(_DeclaredKind, each, readers={"name": read_name, "devices": _devices})
        if own.name in known_kinds():
            what = f"{own.name!r} is the name of a known kind of hardware"
            each.mapping()["name"].fail(what, "choose another name; a group of nodes may replace its price and cores")
        memory_bytes = ANY_BYTES if own.memory_gib is None else max(1, round(own.memory_gib * GIB))
        source = own.source or each.where
        found[own.name] = HardwareKind(
            own.name, own.cores, memory_bytes, own.devices, own.usd_per_h, source, own.acquire_s, own.power
        )
    check_unique((each.mapping()["name"] for each in values), "hardware kind")
    return found


def _nodes(value: Value, kinds: Mapping[str, HardwareKind], *, taken: int) -> list[Node]:
    group = read_options(_NodeGroup, value, readers={"name": read_name, "devices": _devices})
    fields = value.mapping()
    kind = _hardware(fields, group, kinds)
    total = group.count if group.most is None else group.most
    if not total:
        fields["count"].fail("a group of no nodes", "give at least 1, or up to how many may be rented: `most: 4`")
    if total < group.count:
        what = f"`most` is {total}, less than `count`, {group.count}"
        fields["most"].fail(what, "raise 'most', or leave it out if no node is rented on demand")
    if taken + total > NODES_MAX:
        value.fail(f"more than {NODES_MAX} nodes", "lower 'count' or 'most'")
    start = 0 if group.name else taken
    one = kind.node("")
    return [
        structs.replace(
            one,
            name=f"{group.name or kind.name}-{start + index}",
            cores=kind.cores if group.cores is None else group.cores,
            memory_bytes=kind.memory_bytes if group.memory_bytes is None else group.memory_bytes,
            devices=kind.devices if group.devices is None else group.devices,
            usd_per_h=kind.usd_per_h if group.usd_per_h is None else group.usd_per_h,
            on_demand=index >= group.count,
            rack="" if group.per_rack is None else f"rack-{(taken + index) // group.per_rack}",
        )
        for index in range(total)
    ]


def _hardware(fields: Mapping[str, Value], group: _NodeGroup, kinds: Mapping[str, HardwareKind]) -> HardwareKind:
    value = fields["hardware"]
    if group.hardware in kinds:
        return kinds[group.hardware]
    if group.hardware == LOCAL:
        return local()
    if group.hardware == CUSTOM:
        if group.cores is None:
            value.fail("custom hardware needs 'cores'", "add 'cores: 8' and, where known, memory_bytes and usd_per_h")
        if group.name in known_kinds() or group.name in kinds:
            fields["name"].fail(
                f"{group.name!r} is the name of a known kind of hardware",
                "a custom group's name is its kind, which `profiles` can name; choose another",
            )
        return HardwareKind(group.name or CUSTOM, 1.0, ANY_BYTES)
    custom = HardwareKind(CUSTOM, 1.0, ANY_BYTES)  # stands for those that are handled above
    return value.entry(dict.fromkeys(known_kinds(), custom) | KINDS | dict(kinds), "hardware")


def _devices(value: Value) -> tuple[Device, ...]:
    """The accelerators of a node: each a known kind, or a mapping. Equal names get a number."""
    named: set[str] = set()
    found: list[Device] = []
    for each in value.one_or_more():
        if isinstance(each.content, Mapping):
            options = read_options(_DeclaredDevice, each, readers={"kind": read_name, "name": read_name})
            if options.name in named:
                each.fail(f"two devices are called {options.name!r}", "rename one; names are unique on a node")
            named.update({options.name} - {""})
            memory_bytes = max(1, round(options.memory_gib * GIB))
            found.append(Device(options.name or options.kind, options.kind, memory_bytes, options.clients))
        elif isinstance(each.content, str) and each.content not in ACCELERATORS:
            known = ", ".join(ACCELERATORS)
            each.fail(
                f"unknown accelerator {each.content!r}; known are {known}",
                f"declare it: {{kind: {each.content}, memory_gib: 24}}",
            )
        else:
            found.append(each.entry(ACCELERATORS, "accelerator"))
    counts = Counter(device.name for device in found)
    numbers: Counter[str] = Counter()
    for index, device in enumerate(found):
        if counts[device.name] > 1 and device.name not in named:
            found[index] = structs.replace(device, name=f"{device.name}-{numbers[device.name]}")
            numbers[device.name] += 1
    if len({device.name for device in found}) < len(found):
        value.fail("two devices have the same name", "give each its own 'name'")
    return tuple(found)
