"""From an application to a core: what both drivers, planning and replay begin with.

Promises that a setup is fresh: its policies and beliefs have seen nothing; and that its system has a plan for this
application whose replicas the cluster's nodes could hold, at least one by one. Knows no driver, no clock, no file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sloop.app.application import Application, SystemChoice
from sloop.app.hardware import ANY_BYTES, GIB
from sloop.core import Core
from sloop.core.ledger import fits
from sloop.errors import InputError
from sloop.profile.estimate import Estimate
from sloop.solvers import targets
from sloop.systems import build_system
from sloop.systems.system import System
from sloop.vocabulary import Node


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything a driver needs to know before a run; `beliefs` and the policies in `system` are fresh."""

    application: Application
    system: System
    beliefs: Mapping[tuple[str, str], Estimate]

    def core(self) -> Core:
        """The core of this run. One for each setup: policies and beliefs have memories."""
        return Core(self.application, self.beliefs, self.system.policies, self.application.cluster)


def set_up(application: Application, choice: SystemChoice | None = None, *, must_fit: bool = True) -> Setup:
    """An application under the system it names, or under `choice`. InputError for a variant without a profile, for
    a system that cannot plan for this application, and for one that wants replicas which no node could ever hold;
    unless they need not fit, because it is explained why they do not.
    """
    if choice is not None:
        application = replace(application, system=choice)
    choice = application.system
    system = build_system(choice.name, choice.parameters, where=lambda key: application.locate(f"{choice.path}.{key}"))
    setup = Setup(application, system, beliefs_of(application))
    _rehearse(setup, must_fit=must_fit)
    return setup


def _rehearse(setup: Setup, *, must_fit: bool) -> None:
    """Ask for the first plan, as the core will, so that what cannot be is refused before anything has begun."""
    application, nodes = setup.application, setup.application.cluster
    fresh = Setup(application, setup.system.fresh(), setup.beliefs)
    view = fresh.core().view(0)
    where = application.locate(application.system.path)
    try:
        plan = fresh.system.policies.scale.plan(0, view)
    except InputError as error:
        raise InputError(error.what, where=error.where or where, help=error.help) from None
    specs = [group.spec for target in plan.stages for group in target.groups] if plan and nodes and must_fit else []
    for spec in specs:
        memory_bytes = setup.beliefs[spec.stage, spec.variant].memory_bytes
        allowed = [node for node in view.nodes if spec.node in (None, node.node.name)]
        if not any(fits(spec, memory_bytes, node) for node in allowed):
            raise InputError(
                f"system {setup.system.name} wants replicas of {spec.stage}/{spec.variant} with "
                f"{_size(spec.cores, memory_bytes, spec.device)}, which no node could hold",
                where=where,
                help=f"the largest node, {_largest(nodes)}",
            )


def _largest(nodes: Sequence[Node]) -> str:
    node = max(nodes, key=lambda node: (node.cores, node.memory_bytes))
    return f"{node.name}, has {_size(node.cores, node.memory_bytes, ', '.join(node.devices))}"


def _size(cores: float, memory_bytes: int, devices: str) -> str:
    memory = f", {memory_bytes / GIB:.3g} GiB" if GIB / 1000 <= memory_bytes < ANY_BYTES else ""
    return targets.amount(cores, "core") + memory + (f", {devices}" if devices else "")


def beliefs_of(application: Application) -> dict[tuple[str, str], Estimate]:
    """An estimate for every (stage, variant), fresh. InputError for a variant without a profile."""
    found: dict[tuple[str, str], Estimate] = {}
    for index, stage in enumerate(application.stages):
        for variant in stage.variants:
            if variant.profile is None:
                raise InputError(
                    f"no profile covers {stage.name}/{variant.name}: nothing is known of its speed",
                    where=application.locate(f"stages[{index}]"),
                    help=f"measure it with `sloop profile {variant.model or 'MODEL'}`",
                )
            chosen = application.estimates
            found[stage.name, variant.name] = Estimate(
                variant.profile, accuracy=variant.accuracy, margin=chosen.margin, correct=chosen.correct
            )
    return found
