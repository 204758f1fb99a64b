"""Policies of the thesis: iGniter, Usher and two MILPs place the models of an application on GPUs of one kind.

They know their rates beforehand in the publications, and plan once; here they plan again when a rate has changed by
more than a tenth, or models or devices have changed.

Sources: Elvinger, Towards resource and interference-aware scheduling of ML workloads (ETH Zurich, MSc thesis 505,
2024), for Usher and the MILPs; iGniter (Xu et al., TPDS 2023).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from sloop.api import ROUNDING, NonNegativeFloat, Plan, PositiveInt, counted, listed, ms, s
from sloop.api.devices import IgniterLaw
from sloop.api.policies import (
    ClusterView,
    DeviceContents,
    Metric,
    Placed,
    PlacementMemory,
    PlannedReplica,
    Scale,
    SharedDevices,
    part_of,
    placement_plan,
    share_of,
    targets,
    wanted_rps,
)
from sloop.api.solvers import WHOLE_DEVICE, Content
from sloop_systems.colocation import igniter, usher
from sloop_systems.colocation.milp import Colocation, SharedModel, most_goodput, planned_rates

CHANGE: Final = 0.1
"""A plan stays until a rate has changed by more than this fraction."""
WAIT_NS: Final = ms(100)
"""How long a batch waits to be full (thesis, section 4.3.1)."""


@dataclass(frozen=True, slots=True)
class Colocate(Scale):
    """AO-MILP and WSM-MILP: the placement with the most goodput, by an integer program that ignores waiting time.

    Each model has the same batch size everywhere, the smallest one that serves as much. Shares do not limit replicas.
    """

    metric: Metric = "sm_use"
    """The measure of the compute that a model needs: its `peak_occupancy`, or the mean, weighted by time, of its
    `occupancy` or of the SMs that its kernels use (`sm_use`)."""
    batches: tuple[PositiveInt, ...] = ()
    """The batch sizes to choose from; empty: the powers of two."""
    hardware: str = ""
    """The kind of node to use; empty: the first on which every stage has a profile."""
    variant: str = ""
    """The variant of every stage; empty: the first."""
    initial_rps: NonNegativeFloat = 1.0
    """The rate to plan for at each stage before the first request."""
    rescue: bool = True
    """Whether a stage that the placement leaves out gets one replica where there is room for it."""
    period_ns: PositiveInt = s(10)

    def plan(
        self, now_ns: int, view: ClusterView, memory: PlacementMemory | None
    ) -> tuple[Plan | None, PlacementMemory]:
        """The placement; None while nothing has changed. InputError for a model that fits on no device, and for a
        profile that does not say what the model needs of a device."""
        return _planned(self, view, memory, self._placed, self.metric)

    def _placed(self, devices: SharedDevices, rates: Sequence[float]) -> Placed:
        contents, found, _ = _solved(
            devices, rates, self.metric, lambda models: most_goodput(models, len(devices.pools[0].places))
        )
        why = f"{counted(len(contents), 'device')} for {found.total_rps:.4g} requests/s, by {self.metric}"
        return contents, found.served_rps, why


@dataclass(frozen=True, slots=True)
class Usher(Scale):
    """Usher: groups of models that complement each other, placed one group after the other.

    The share of each replica is the compute that it needs.
    """

    metric: Metric = "peak_occupancy"
    """The measure of the compute that a model needs: its `peak_occupancy`, or the mean, weighted by time, of its
    `occupancy` or of the SMs that its kernels use (`sm_use`)."""
    groups: tuple[tuple[str, ...], ...] = ()
    """Groups of stages in the order of placement, instead of those that Usher forms."""
    batches: tuple[PositiveInt, ...] = ()
    """The batch sizes to choose from; empty: the powers of two."""
    hardware: str = ""
    """The kind of node to use; empty: the first on which every stage has a profile."""
    variant: str = ""
    """The variant of every stage; empty: the first."""
    initial_rps: NonNegativeFloat = 1.0
    """The rate to plan for at each stage before the first request."""
    rescue: bool = True
    """Whether a stage that the placement leaves out gets one replica where there is room for it."""
    period_ns: PositiveInt = s(10)

    def plan(
        self, now_ns: int, view: ClusterView, memory: PlacementMemory | None
    ) -> tuple[Plan | None, PlacementMemory]:
        """See `Colocate`."""
        return _planned(self, view, memory, self._placed, self.metric)

    def _placed(self, devices: SharedDevices, rates: Sequence[float]) -> Placed:
        def solution(models: Sequence[SharedModel]) -> Colocation:
            return usher.plan(models, len(devices.pools[0].places), groups=self._groups(devices.view, models))

        contents, found, models = _solved(devices, rates, self.metric, solution, is_limited=True)
        groups = self._groups(devices.view, models)
        named = "; ".join(" + ".join(models[at].name for at in group) for group in groups)
        why = f"{counted(len(contents), 'device')} for {found.total_rps:.4g} requests/s; groups {named}"
        return contents, found.served_rps, why

    def _groups(self, view: ClusterView, models: Sequence[SharedModel]) -> Sequence[tuple[int, ...]]:
        if not self.groups:
            return usher.grouped(models)
        targets.check_stages(view, {name: None for group in self.groups for name in group}, "groups")
        found = [
            tuple(at for at, stage in enumerate(view.stages) if targets.declared_for(stage, dict.fromkeys(own, True)))
            for own in self.groups
        ]
        return [group for group in found if group]


@dataclass(frozen=True, slots=True)
class Igniter(Scale):
    """iGniter: each model gets the batch and the smallest share with which a batch takes at most half of its deadline,
    on the GPU where the shares of all models together grow least. If the plan needs more GPUs than there are, the
    surplus ones are left out, the last first. A model without coefficients gets devices of its own."""

    check_new: bool = True
    """Whether the deadline of a model is also checked on a GPU on which it is the first model; the publication checks
    only models that join others."""
    batches: tuple[PositiveInt, ...] = ()
    """The batch sizes to choose from for a model without coefficients; empty: the powers of two."""
    hardware: str = ""
    """The kind of node to use; empty: the first on which every stage has a profile."""
    variant: str = ""
    """The variant of every stage; empty: the first."""
    initial_rps: NonNegativeFloat = 1.0
    """The rate to plan for at each stage before the first request."""
    rescue: bool = True
    """Whether a stage that the placement leaves out gets one replica where there is room for it."""
    period_ns: PositiveInt = s(10)

    def plan(
        self, now_ns: int, view: ClusterView, memory: PlacementMemory | None
    ) -> tuple[Plan | None, PlacementMemory]:
        """The placement; None while nothing has changed."""
        return _planned(self, view, memory, self._placed, "sm_use")

    def _placed(self, devices: SharedDevices, rates: Sequence[float]) -> Placed:
        laws = {at: law for at in range(len(devices.stages)) if (law := _law(devices, at)) is not None}
        deadlines_ms, pool = devices.deadlines_ms(), devices.pools[0]
        workloads = []
        for at, law in laws.items():
            belief = devices.belief(at, 0)
            assert belief is not None, at
            memory = max(part_of(belief.device_memory_bytes, pool.memory_bytes), devices.beside_device(belief, pool))
            named = str(at), law.model, rates[at], deadlines_ms[at]
            workloads.append(igniter.IgniterWorkload(*named, belief.batch_max, memory / WHOLE_DEVICE))
        contents: list[DeviceContents] = []
        for own in igniter.plan(next(iter(laws.values())).gpu, workloads, check_new=self.check_new) if laws else ():
            replicas = [
                PlannedReplica(int(each.workload.name), each.batch, share_of(each.share), each.rate_rps) for each in own
            ]
            contents.append((0, tuple(replicas)))
        for at in range(len(devices.stages)):
            if at not in laws:
                contents += _alone(devices, at, rates[at], deadlines_ms[at] / 2)
        kept = contents[: len(pool.places)]
        served = [0.0] * len(devices.stages)
        for replica in (each for _, replicas in kept for each in replicas):
            served[replica.stage] += replica.rate_rps
        why = f"{counted(len(contents), 'device')} needed, {len(kept)} available"
        unknown = [stage.name for at, stage in enumerate(devices.stages) if at not in laws]
        if unknown:
            why += f"; devices of their own for {listed(unknown)}, whose profiles have no coefficients of iGniter"
        return kept, served, why


def _alone(devices: SharedDevices, at: int, rate_rps: float, limit_ms: float) -> list[DeviceContents]:
    """Devices for a stage alone, because its interference is unknown: as many as carry its rate with the batch that
    serves most among those that take at most half of its deadline."""
    options = devices.options(at, 0, "sm_use")
    option = max([each for each in options if each.latency_ms <= limit_ms] or options[:1], key=lambda o: o.rate_rps)
    count = max(1, math.ceil(rate_rps / option.rate_rps - ROUNDING))
    share = 1.0 if devices.pools[0].accelerator else 0.0
    each = min(option.rate_rps, rate_rps / count)
    return [(0, (PlannedReplica(at, option.batch, share, each),))] * min(count, len(devices.pools[0].places))


def _law(devices: SharedDevices, at: int) -> IgniterLaw | None:
    """iGniter's coefficients of a stage, and of its device; None if the profile has none."""
    belief = devices.belief(at, 0)
    law: object = belief.interference if belief is not None else None
    return law if isinstance(law, IgniterLaw) else None


# What the three have in common


def _planned(
    policy: Colocate | Usher | Igniter,
    view: ClusterView,
    memory: PlacementMemory | None,
    place: Callable[[SharedDevices, Sequence[float]], Placed],
    metric: Metric,
) -> tuple[Plan | None, PlacementMemory]:
    kind = targets.kind_of(view, policy.hardware, view.stages)
    devices = SharedDevices(view, (kind,), batches=policy.batches, variant=policy.variant, one_pool=True)
    return placement_plan(
        devices,
        wanted_rps(view, policy.initial_rps),
        place,
        memory,
        change=CHANGE,
        wait_ns=WAIT_NS,
        rescue=metric if policy.rescue else None,
    )


def _solved(
    devices: SharedDevices,
    rates: Sequence[float],
    metric: Metric,
    solution: Callable[[Sequence[SharedModel]], Colocation],
    *,
    is_limited: bool = False,
) -> tuple[list[DeviceContents], Colocation, list[SharedModel]]:
    """A placement by the memory that each batch needs. If the replicas then reserve more than a device has, a placement
    by the memory that they reserve."""
    contents: list[DeviceContents] = []
    for reserved in (False, True):
        models = _models(devices, rates, metric, reserved=reserved)
        found = solution(models)
        contents = _replicas(models, found.contents, is_limited=is_limited)
        if not devices.overbooks(contents):
            break
    return contents, found, models


def _models(devices: SharedDevices, rates: Sequence[float], metric: Metric, *, reserved: bool) -> list[SharedModel]:
    options = [devices.options(at, 0, metric, must_know=True, reserved=reserved) for at in range(len(devices.stages))]
    devices.check_fit([[own] for own in options])
    return [
        SharedModel(stage.name, rate, deadline_ms, own)
        for stage, rate, deadline_ms, own in zip(devices.stages, rates, devices.deadlines_ms(), options, strict=True)
    ]


def _replicas(models: Sequence[SharedModel], contents: Sequence[Content], *, is_limited: bool) -> list[DeviceContents]:
    """The contents that a solver has found, as replicas. Their shares are 0 unless they are limits (`is_limited`)."""
    rates = planned_rates(models, contents)
    return [
        (
            0,
            tuple(
                PlannedReplica(at, option.batch, option.compute / WHOLE_DEVICE if is_limited else 0.0, rate_rps)
                for (at, option), rate_rps in zip(content, own, strict=True)
            ),
        )
        for content, own in zip(contents, rates, strict=True)
    ]
