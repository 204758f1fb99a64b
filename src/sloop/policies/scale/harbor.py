"""Harbor: our placement of the models of an application on shared devices of several kinds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from sloop.core.protocols import Scale
from sloop.core.views import ClusterView
from sloop.errors import InputError
from sloop.options import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from sloop.policies import targets
from sloop.policies.devices import (
    Metric,
    Placed,
    PlacementMemory,
    PlannedReplica,
    SharedDevices,
    placement_plan,
    wanted_rps,
)
from sloop.profile.interference import NO_SLOWDOWN, DeviceDemand, Interference
from sloop.solvers import harbor
from sloop.solvers.contents import WHOLE_DEVICE, Content, content_needs
from sloop.solvers.harbor import DeviceKind, HarborProblem, PlacedModel, ServingAssumptions
from sloop.text import counted, listed
from sloop.units import ms, s, to_ms
from sloop.vocabulary import Plan, ReplicaSpec, StagePlan

METRIC: Final[Metric] = "sm_use"
"""How much of a device's compute a model needs: the SMs that its kernels use."""


@dataclass(frozen=True, slots=True)
class Harbor(Scale):
    """A placement on devices of several kinds that counts waiting, transfers and the slowdown by other models on the
    device (`sloop.solvers.harbor`).

    A plan stays in force until a rate has changed by more than `change`, or models or devices have changed. Replicas
    stay where they are unless a new placement is better by `gain`. Until a model has finished batches, its inferences
    are expected to take `slower` times as long as profiled; if batches of other models have finished on such a device,
    the mean of their factors replaces `slower`. Fails if arrivals are burstier than Poisson arrivals: the estimated
    waiting time is then too short.
    """

    headroom: NonNegativeFloat = 0.0
    """Plan for the demand times 1 + `headroom`."""
    margin: Fraction = 1.0
    """Fraction of every deadline to plan with."""
    wait_ns: NonNegativeInt = ms(100)
    """How long a batch waits to be full, if the batch policy reads it from the plan."""
    batches: tuple[PositiveInt, ...] = ()
    """The batch sizes to choose from; empty: the powers of two."""
    cores: NonNegativeFloat = 0.0
    """Cores of a replica; 0: as many as its profile can use. At most an equal part of the node for each stage."""
    variant: str = ""
    """The variant of every stage; empty: the first."""
    initial_rps: NonNegativeFloat = 1.0
    """The rate to plan for at each stage before the first request."""
    change: NonNegativeFloat = 0.1
    """A plan stays until a rate has changed by more than this fraction."""
    rescue: bool = True
    """Whether a stage that the placement leaves out gets one replica where there is room for it."""
    period_ns: PositiveInt = s(10)
    gain: NonNegativeFloat = 0.02
    """How much better, as a fraction, another placement must be to replace the one in force."""
    hardware: tuple[str, ...] = ()
    """The kinds of nodes to use; empty: all."""
    slower: PositiveFloat = 1.18
    """How many times as long as profiled an inference takes beside other busy workers, while nothing is measured.

    1.18 is fitted to the figures of one thesis (κ of `sloop reproduce colocation`), whose host had fewer cores than
    processes. Set 1 where workers do not slow each other down, because each has a core of its own."""
    transport_ns: NonNegativeInt = ms(1)
    """The time that a request and its answer spend outside queues and workers."""
    horizon_ns: PositiveInt = s(10)
    """The time over which the growth of queues under overload is computed."""

    def plan(
        self, now_ns: int, view: ClusterView, memory: PlacementMemory | None
    ) -> tuple[Plan | None, PlacementMemory]:
        """The placement; None while nothing has changed. InputError for a model that fits on no device."""
        devices = SharedDevices(
            view,
            self._kinds(view),
            batches=self.batches,
            variant=self.variant,
            cores=self.cores,
            margin=self.margin,
        )
        # A measurement may leave the beliefs unchanged and still replace an expected factor.
        factors = tuple(tuple(round(factor, 2) for factor in own) for own in self._unmeasured(devices))
        return placement_plan(
            devices,
            wanted_rps(view, self.initial_rps, self.headroom),
            self._placed,
            memory,
            change=self.change,
            wait_ns=self.wait_ns,
            rescue=METRIC if self.rescue else None,
            factors=factors,
        )

    def _kinds(self, view: ClusterView) -> tuple[str, ...]:
        for kind in self.hardware:
            targets.check_kind(view, kind)
        kinds = [kind for kind in targets.kinds_of(view) if kind in self.hardware or not self.hardware]
        missing = [stage.name for stage in view.stages if not any(stage.on(kind) for kind in kinds)]
        if missing and self.hardware:
            raise InputError(
                f"{listed(missing)}: no profile for {listed(kinds, 'or')}",
                help="add a profile for one of these kinds, or name another kind under `hardware`",
            )
        return tuple(kinds)

    def _placed(self, devices: SharedDevices, rates: Sequence[float]) -> Placed:
        problem = self._problem(devices, rates)
        present = self._present(devices, problem)
        found = harbor.place_models(problem) if present is None else harbor.replaced(problem, present, gain=self.gain)
        counts: dict[int, int] = {}
        for _, content in found.contents:
            for at, _ in content:
                counts[at] = counts.get(at, 0) + 1
        contents = [
            (
                kind,
                tuple(PlannedReplica(at, option.batch, 0.0, rates[at] / counts[at]) for at, option in content),
            )
            for kind, content in found.contents
        ]
        has_prices = any(pool.usd_per_h for pool in devices.pools)
        price = f" and {found.usd_per_h:.4g} USD/h" if found.usd_per_h and has_prices else ""
        proof = "" if found.proven else ", within the bound of the search"
        why = f"{counted(len(contents), 'device')} for {found.total_rps:.4g} of {sum(rates):.4g} requests/s in time"
        return contents, found.served_rps, f"{why}{price}{proof}"

    def _unmeasured(self, devices: SharedDevices) -> list[list[float]]:
        """By stage and kind of device, the factor by which inferences are expected to take longer than believed.

        A correction is the weighted mean of measured factors and of a prior of 1, which stands for the profile. Here
        the prior is `slower` instead of 1 or, if other models have been measured, the mean of their factors, because
        all models on a host are slowed down by the same other work.
        """
        found = [[1.0] * len(devices.pools) for _ in devices.stages]
        for pool in range(len(devices.pools)):
            beliefs = [(at, belief) for at in range(len(found)) if (belief := devices.belief(at, pool)) is not None]
            if not beliefs:
                continue
            least = min(belief.prior_weight for _, belief in beliefs)
            taught = math.fsum(belief.correction - belief.prior_weight for _, belief in beliefs)
            lessons = math.fsum(1.0 - belief.prior_weight for _, belief in beliefs)
            expected = (least * self.slower + taught) / (least + lessons)
            for at, belief in beliefs:
                found[at][pool] = 1.0 + belief.prior_weight * (expected - 1.0) / belief.correction
        return found

    def _problem(self, devices: SharedDevices, rates: Sequence[float]) -> HarborProblem:
        pools = devices.pools
        options = [
            [
                tuple(replace(each, latency_ms=factor * each.latency_ms) for each in devices.options(at, pool, METRIC))
                for pool, factor in enumerate(own)
            ]
            for at, own in enumerate(self._unmeasured(devices))
        ]
        devices.check_fit(options)
        models = tuple(
            PlacedModel(stage.name, rate, deadline_ms, tuple(own))
            for stage, rate, deadline_ms, own in zip(
                devices.stages, rates, devices.deadlines_ms(), options, strict=True
            )
        )
        rentable = [pool for pool in pools if len(pool.places) > pool.owned]
        priced = [pool.usd_per_h > 0 for pool in rentable]
        if any(priced) and not all(priced):
            without = listed([pool.hardware for pool in rentable if not pool.usd_per_h])
            raise InputError(f"nodes on demand without a price: {without}", help="declare `usd_per_h` for them")
        kinds = tuple(
            DeviceKind(
                pool.hardware,
                pool.owned,
                len(pool.places) - pool.owned,
                pool.usd_per_h or (0.0 if any(priced) or pool not in rentable else 1e-6),
                pool.per_node,
            )
            for pool in pools
        )
        return HarborProblem(
            models,
            kinds,
            ServingAssumptions(
                wait_ms=to_ms(self.wait_ns),
                slower=1.0,
                rpc_ms=to_ms(self.transport_ns) / 2,
                network_ms=0.0,
                network_ms_per_mb=0.0,
                horizon_s=to_ms(self.horizon_ns) / 1000,
            ),
            slowdown=_slowdowns(devices),
        )

    def _present(self, devices: SharedDevices, problem: HarborProblem) -> Sequence[tuple[int, Content]] | None:
        """The contents of the devices under the plan in force. None if there is no plan, or if it does not fit the
        present devices and models."""
        plan = devices.view.plan
        batches = _batches(plan.stages if plan else ())
        pool_of = {place: number for number, pool in enumerate(devices.pools) for place in pool.places}
        index = {stage.name: at for at, stage in enumerate(devices.stages)}
        found: list[tuple[int, Content]] = []
        for place, specs in devices.present().items():
            pool = pool_of.get(place)
            if pool is None:
                return None
            residents = []
            for spec in specs:
                at = index.get(spec.stage, -1)
                belief = devices.belief(at, pool) if at >= 0 else None
                options = problem.models[at].options[pool] if at >= 0 else ()
                option = next((each for each in options if each.batch == batches[spec]), None)
                if belief is None or option is None or spec.slot != devices.slot(belief, devices.pools[pool], 0.0):
                    return None
                residents.append((at, option))
            content = tuple(sorted(residents, key=lambda each: each[0]))
            if max(content_needs(content)) > WHOLE_DEVICE:
                return None
            found.append((pool, content))
        return found or None


def _batches(stages: Sequence[StagePlan]) -> Mapping[ReplicaSpec, int]:
    return {group.spec: target.batch_max_of(group) for target in stages for group in target.groups}


def _slowdowns(devices: SharedDevices) -> harbor.SlowdownOf | None:
    """The function that computes the slowdown of each model on a device by the beliefs' laws of interference; None if
    no model has a law."""
    every = [(at, pool) for at in range(len(devices.stages)) for pool in range(len(devices.pools))]
    laws: dict[tuple[int, int], Interference] = {}
    for key in every:
        belief = devices.belief(*key)
        if belief is not None:
            laws[key] = belief.interference
    if all(law == NO_SLOWDOWN for law in laws.values()):
        return None
    demands: dict[tuple[int, int, int], DeviceDemand] = {}

    def demand(at: int, pool: int, batch: int) -> DeviceDemand:
        found = demands.get((at, pool, batch))
        if found is None:
            own = devices.belief(at, pool)
            assert own is not None, (at, pool)
            slot = devices.slot(own, devices.pools[pool], 0.0)
            found = demands[at, pool, batch] = own.demand(batch, slot)
        return found

    def slowdowns(pool: int, content: Content) -> list[float]:
        if len(content) == 1:
            return [1.0]
        running = [demand(at, pool, option.batch) for at, option in content]
        return [
            max(1.0, laws[at, pool].slowdown(running[place], running[:place] + running[place + 1 :]))
            if (at, pool) in laws
            else 1.0
            for place, (at, _) in enumerate(content)
        ]

    return slowdowns
