"""Builds a core for a deployment: the first step of both drivers, of planning and of replay.

A setup is fresh: its policies and beliefs have no history. The system of each application has a plan for it, and each
replica of that plan alone fits on some node. Must not depend on a driver, clock or file.

An application version that is deployed while others serve is described by its definition: plain values that JSON can
hold, from which `build` makes the same parts wherever it is called, in a server or in a replay.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from msgspec import structs

from sloop.app.application import Application, Deployment, Stage, SystemChoice, Variant
from sloop.app.hardware import ANY_BYTES, local_limit
from sloop.core import ApplicationParts, Core
from sloop.core.application import why_not_in_place
from sloop.core.ledger import Ledger, sites, why_impossible
from sloop.core.protocols import Policies
from sloop.core.provision import first_weights_bytes
from sloop.core.views import NodeView, StartCosts
from sloop.errors import InputError
from sloop.events import WOKE
from sloop.options import placed
from sloop.policies.scale.static import check_overbooked
from sloop.profile.estimate import Estimate
from sloop.profile.profile import digest
from sloop.systems import build_system
from sloop.systems.mix import WorkMix
from sloop.systems.system import System, is_system_file
from sloop.text import counted, listed
from sloop.units import GIB, s
from sloop.user_code import raise_user_error
from sloop.vocabulary import Group, ModelWeights, Node, ReplicaSpec

EstimateMap = dict[tuple[str, str, str], Estimate]
"""The estimate of each stage, variant and kind of hardware."""


@dataclass(frozen=True, slots=True)
class ApplicationSetup:
    """One version of an application with fresh policies and beliefs."""

    application: Application
    system: System
    beliefs: EstimateMap
    mixes: Mapping[str, WorkMix] = field(default_factory=dict)
    """By stage, what requests bring, for plans at steady rates; one row of the only size at the others."""

    def bringing(self, mixes: Mapping[str, WorkMix]) -> "ApplicationSetup":
        """This setup, whose beliefs now are those of the mean of what requests bring to these stages."""
        for (stage, _, _), belief in self.beliefs.items():
            if stage in mixes:
                mixes[stage].teach(belief)
        return replace(self, mixes=mixes)

    def parts(self) -> ApplicationParts:
        """What a core needs of it. Two cores of one setup would share the state of beliefs."""
        application = self.application
        return ApplicationParts(
            graph=application.graph,
            beliefs=self.beliefs,
            policies=self.system.policies,
            overseer=self.system.overseer,
            choices=self.system.choices,
            name=application.name,
            version=application.version,
            system=application.system.text,
            weight=application.weight,
            rest_after_ns=s(application.rest_after_s),
            wake_ns=s(application.wake_s),
            response_timeouts_ns={
                stage.name: s(stage.response_timeout_s) for stage in application.stages if stage.response_timeout_s
            },
            size_classes={stage.name: stage.size_classes for stage in application.stages},
            padded=frozenset(stage.name for stage in application.stages if stage.pads),
            divided=frozenset(stage.name for stage in application.stages if stage.keeps_rows_apart),
            starts=starts_of(application),
        )


@dataclass(frozen=True, slots=True)
class Setup:
    """The input of a run: every application of a deployment, set up."""

    deployment: Deployment
    applications: tuple[ApplicationSetup, ...]
    first_worker: int = 0
    """The number of the first worker that is started."""

    @property
    def application(self) -> Application:
        """The only application. ValueError if there are several."""
        return self.deployment.application

    @property
    def system(self) -> System:
        """The system of the only application. ValueError if there are several."""
        (only,) = self.applications
        return only.system

    @property
    def beliefs(self) -> EstimateMap:
        """The estimates of all applications."""
        return {key: belief for each in self.applications for key, belief in each.beliefs.items()}

    def under(self, policies: Policies) -> "Setup":
        """This setup with these policies for all applications, which share their state."""
        systems = [replace(each.system, policies=policies) for each in self.applications]
        pairs = zip(self.applications, systems, strict=True)
        return replace(self, applications=tuple(replace(each, system=system) for each, system in pairs))

    def parts(self) -> tuple[ApplicationParts, ...]:
        """What a core needs of each application."""
        return tuple(each.parts() for each in self.applications)

    def core(self) -> Core:
        """The core of this run. Call it once: two cores of one setup would share the state of policies and beliefs."""
        return Core(self.parts(), self.deployment.cluster, build, first_worker=self.first_worker)


def mixes_of(application: Application, mix: WorkMix) -> dict[str, WorkMix]:
    """What requests bring to each stage of an application: to the first ones all, to later ones as many rows; a part of
    a request is one row, as is what its parts are joined to."""
    found: dict[str, WorkMix] = {}
    for stage in application.order:
        if not stage.after:
            found[stage.name] = mix
        elif not application.graph.scopes[stage.name] and all(name in found for name in stage.after):
            found[stage.name] = mix.behind
    return found


def set_up(declared: Application | Deployment, choice: SystemChoice | None = None, *, must_fit: bool = True) -> Setup:
    """The setup of a deployment, or of one application, with the declared system, or with `choice`.

    InputError for a variant without a profile, for a mistake in a shadow system, for a system that cannot plan for an
    application and, with `must_fit`, for a plan with a replica that fits on no node. `sloop plan` sets
    `must_fit=False`, to explain what is missing.
    """
    deployment = declared if isinstance(declared, Deployment) else Deployment.of(declared)
    if choice is not None:
        deployment = deployment.under(choice)
    for shadow in deployment.shadows:
        build_system(shadow.name, shadow.declared)
    setup = Setup(deployment, tuple(map(_set_up, deployment.applications)))
    _rehearse(setup, must_fit=must_fit)
    return setup


def _set_up(application: Application) -> ApplicationSetup:
    choice = application.system
    system = build_system(choice.name, choice.declared)
    return ApplicationSetup(application, system, beliefs_of(application, resizes=system.resizes))


def beliefs_of(application: Application, *, resizes: bool = True) -> EstimateMap:
    """A fresh estimate for every stage, variant and kind of hardware on which the variant can run. Without `resizes`,
    replicas take only the memory of a model for one number of threads. InputError for a variant that can run
    nowhere."""
    found: EstimateMap = {}
    chosen = application.estimates
    for index, stage in enumerate(application.stages):
        for variant in stage.variants:
            profiles = application.profiles_of(variant)
            if not profiles:
                what, where = f"{stage.name}/{variant.name} has no profile", application.locate(f"stages[{index}]")
                if variant.profiles or variant.profile is not None:
                    what += f" for any kind of the cluster ({listed(application.hardware)})"
                    help = "add the kind's profile under `profiles`, or nodes of a kind that has one"
                    raise InputError(what, where=where, help=help)
                help = f"measure it with `sloop profile {variant.model or 'MODEL'}`"
                help += "; `sloop serve` measures a model briefly before it serves it" if variant.model else ""
                raise InputError(f"{what}, so its speed is unknown", where=where, help=help)
            for hardware, profile in profiles.items():
                if stage.sizes and not profile.knows_sizes and not chosen.correct:
                    what = f"{stage.name} has `sizes`, its profile knows none, and `correct: false` learns none"
                    help = "leave `correct` out, or measure them: sloop profile MODEL --sizes"
                    raise InputError(what, where=application.locate("estimates"), help=help)
                found[stage.name, variant.name, hardware] = Estimate(
                    profile if resizes else profile.never_resized(),
                    variant=variant.name,
                    hardware=hardware,
                    accuracy=variant.accuracy,
                    classes=stage.size_classes,
                    margin=chosen.margin,
                    correct=chosen.correct,
                )
    return found


def weights_of(application: Application) -> dict[tuple[str, str, str], ModelWeights]:
    """The weights of every stage, variant and kind of hardware where it can run. Models with the same file, or measured
    with the same digest, are the same; a variant without a model has weights of its own."""
    found: dict[tuple[str, str, str], ModelWeights] = {}
    for stage in application.stages:
        for variant in stage.variants:
            for hardware, profile in application.profiles_of(variant).items():
                name = variant.model or profile.model_digest or f"{stage.name}/{variant.name}"
                weights = ModelWeights(name, variant.weights_bytes(hardware), digest=profile.model_digest)
                found[stage.name, variant.name, hardware] = weights
    return found


def starts_of(application: Application) -> dict[tuple[str, str, str], StartCosts]:
    """What a start of every stage, variant and kind of hardware consists of. A start whose parts are unknown counts as
    one of the process alone."""
    found: dict[tuple[str, str, str], StartCosts] = {}
    for (stage, variant, hardware), weights in weights_of(application).items():
        profile = application.by_name[stage].variant(variant).on(hardware)
        parts = profile.startup if profile is not None else None
        if parts is None:
            made = StartCosts(weights, process_s=profile.load_s if profile is not None else 0.0)
        else:
            made = StartCosts(weights, parts.process_s, parts.weights_s, parts.send_s, parts.first_batch_s)
        if profile is not None and profile.layers is not None:
            made = structs.replace(made, layer_bytes=tuple(each.param_bytes for each in profile.layers.blocks))
        found[stage, variant, hardware] = made
    return found


# Definitions: an application version as plain values.


def definition_of(setup: ApplicationSetup) -> dict[str, Any]:
    """The application version as JSON can hold it: as declared, with profiles, system and parameters. Of the cluster,
    which other applications share, it has one node of each kind."""
    application, kinds = setup.application, dict[tuple[str, ...], Node]()
    for node in application.cluster:
        kinds.setdefault((node.hardware, *(device.kind for device in node.devices)), node)
    system = replace(application.system, lines={}, inherited={})
    if is_system_file(system.name):
        system = replace(system, digest=digest(Path(system.name)))
    # Lines belong to the file; a copy has no cached values.
    bare = replace(application, cluster=tuple(kinds.values()), system=system, lines={})
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(bare))
    return plain


def application_in(definition: Mapping[str, Any]) -> Application:
    """The application that a definition describes. InputError if it describes none."""
    try:
        application = msgspec.convert(definition, Application, strict=False)
        assert application.stages, "it has no stages"
        application.graph  # noqa: B018  # computed, and fails if stages refer to missing ones or form a cycle
    except (msgspec.ValidationError, KeyError, AssertionError) as error:
        what = f"the definition does not describe an application: {error!r}"
        raise InputError(what, help="record the run again with this sloop") from error
    return application


def build(name: str, version: str, definition: Mapping[str, Any]) -> ApplicationParts:
    """The parts of an application version, fresh, from its definition. A core calls it when the version is deployed."""
    application = application_in(definition)
    assert (application.name, application.version) == (name, version), (application.key, name, version)
    return _set_up(application).parts()


def check_in_place(before: Application, after: Application) -> ApplicationSetup:
    """An application version under another system, set up. InputError, as `set_up` raises it, or if that system cannot
    take over the replicas of the one before."""
    (made,) = set_up(after).applications
    deciding = build_system(before.system.name, before.system.declared)
    why = why_not_in_place(deciding.policies, made.system.policies)
    if why:
        what = f"system {made.system.name!r} cannot take over from {deciding.name!r}: {why}"
        raise InputError(what, where=after.system.declared.where, help="deploy a new version under it")
    return made


# The rehearsal of the first plan.


def _rehearse(setup: Setup, *, must_fit: bool) -> None:
    """Let a core make its first plans, so that an impossible plan is refused before anything starts."""
    fresh = [replace(each, system=each.system.fresh()) for each in setup.applications]
    core = Core([each.parts() for each in fresh], setup.deployment.cluster)
    core.handle(0, WOKE)
    if core.plan_input is not None:
        core.handle(0, core.planner.plan(core.plan_input))
    empty = [structs.replace(node, on_demand=False) for node in setup.deployment.cluster]
    nodes = Ledger(empty).views()
    for each in fresh:
        error = core.planner.failures.get(each.application.key)
        if error is not None:
            raise_of_policy(error, each, several=len(setup.applications) > 1)
        plan = core.plan_of(each.application.key)
        if plan is None or not nodes or not must_fit:
            continue
        wanted = dict.fromkeys(group.spec for target in plan.stages for group in target.groups if group.count)
        for spec in wanted:
            _check_room(spec, each, nodes, _weights_bytes(spec, each))
    if must_fit:
        _check_placements(fresh, core, setup)


def _check_placements(fresh: Sequence[ApplicationSetup], core: Core, setup: Setup) -> None:
    """InputError if applications whose replicas are all placed by hand do not fit beside each other: nobody would ever
    move one."""
    placed: list[tuple[Group, Estimate]] = []
    for each in fresh:
        scale, plan = each.system.policies.scale, core.plan_of(each.application.key)
        if scale.is_fixed and plan is not None:
            for group in (group for target in plan.stages for group in target.groups):
                spec = group.spec
                placed.append((group, each.beliefs[spec.stage, spec.variant, spec.slot.hardware]))
    check_overbooked(setup.deployment.cluster, placed)


def raise_of_policy(error: BaseException, failed: ApplicationSetup, *, several: bool) -> NoReturn:
    """Raise the exception of a policy at the place of its system in the user's file; of a system that is a Python file,
    at the line that raised it. `several` says whether there are other applications."""
    choice = failed.application.system
    if is_system_file(choice.name) and not isinstance(error, InputError):
        raise_user_error(error, Path(choice.name), "it cannot plan")
    of = f"application {failed.application.name!r}: " if several else ""
    with placed(choice.declared):
        if isinstance(error, InputError) and not error.where:
            raise InputError(f"{of}{error.what}", help=error.help) from error
        raise error


def _weights_bytes(spec: ReplicaSpec, planned: ApplicationSetup) -> int:
    """See `first_weights_bytes`."""
    costs = starts_of(planned.application).get((spec.stage, spec.variant, spec.slot.hardware))
    return 0 if costs is None else first_weights_bytes(planned.system.policies.provision, costs)


def _check_room(spec: ReplicaSpec, planned: ApplicationSetup, nodes: Sequence[NodeView], weights_bytes: int) -> None:
    """InputError if no node could hold the replica and its weights although it were empty."""
    belief = planned.beliefs[spec.stage, spec.variant, spec.slot.hardware]
    needed_bytes = belief.memory_bytes + weights_bytes
    if any(needed_bytes <= site.node.free_memory_bytes for site in sites(spec, belief, nodes)):
        return
    what = f"system {planned.system.name} wants replicas of {spec.stage}/{spec.variant} with {_size_of(spec, belief)}"
    if weights_bytes:
        what += (
            _memory(weights_bytes, " and, for its weights on a node, ") or " and some memory for its weights on a node"
        )
    declared = planned.application.system.declared
    cluster = [view.node for view in nodes]
    why = why_impossible(spec, cluster)
    if why:
        declared.fail(f"{what}: {why}", "name hardware of the cluster, or add such nodes")
    of_kind = [node for node in cluster if spec.slot.hardware in ("", node.hardware)]
    limits = [local_limit(of_kind, resource) for resource in ("cores", "memory")]
    limited = f"; this machine is limited to {listed(list(filter(None, limits)))}" if any(limits) else ""
    declared.fail(f"{what}, which no node could hold", f"the largest node, {_largest(of_kind)}{limited}")


def _size_of(spec: ReplicaSpec, belief: Estimate) -> str:
    device = ""
    if spec.slot.accelerator:
        device = f"{spec.slot.share:g} of a {spec.slot.accelerator}" + _memory(belief.device_memory_bytes, " with ")
    return _size(spec.cores, belief.memory_bytes, device)


def _largest(nodes: Sequence[Node]) -> str:
    node = max(nodes, key=lambda node: (node.cores, node.memory_bytes))
    devices = ", ".join(f"{each.kind}{_memory(each.memory_bytes, ' with ')}" for each in node.devices)
    return f"{node.name}, has {_size(node.cores, node.memory_bytes, devices)}"


def _size(cores: float, memory_bytes: int, devices: str) -> str:
    return counted(cores, "core") + _memory(memory_bytes, ", ") + (f", {devices}" if devices else "")


def _memory(memory_bytes: int, before: str) -> str:
    return f"{before}{memory_bytes / GIB:.3g} GiB" if GIB / 1000 <= memory_bytes < ANY_BYTES else ""


def with_lone_requests(
    setup: Setup, runs_alone: Callable[[Application, Stage, Variant], bool], *, must_fit: bool = True
) -> Setup:
    """The setup with a largest batch of 1 for variants whose requests cannot share a forward pass: their profiles may
    have larger batches."""

    def served(application: Application, stage: Stage) -> Stage:
        own = [v.with_batch_of_one() if runs_alone(application, stage, v) else v for v in stage.variants]
        return replace(stage, variants=tuple(own))

    applications = tuple(
        replace(each, stages=tuple(served(each, stage) for stage in each.stages))
        for each in setup.deployment.applications
    )
    if applications == setup.deployment.applications:
        return setup
    return set_up(replace(setup.deployment, applications=applications), must_fit=must_fit)
