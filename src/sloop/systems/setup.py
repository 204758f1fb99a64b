"""Builds a core for an application: the first step of both drivers, of planning and of replay.

A setup is fresh: its policies and beliefs have no history. Its system has a plan for the application, and each replica
of that plan alone fits on some node. Must not depend on a driver, clock or file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sloop.app.application import Application, SystemChoice
from sloop.app.hardware import ANY_BYTES, GIB
from sloop.core import Core
from sloop.core.ledger import fits
from sloop.errors import InputError
from sloop.events import WOKE
from sloop.options import Value, placed
from sloop.profile.estimate import Estimate
from sloop.systems import build_system
from sloop.systems.system import System
from sloop.text import counted
from sloop.vocabulary import Node


@dataclass(frozen=True, slots=True)
class Setup:
    """The input of a run; `beliefs`, by (stage, variant), and the policies in `system` are fresh."""

    application: Application
    system: System
    beliefs: Mapping[tuple[str, str], Estimate]

    def core(self) -> Core:
        """The core of this run. Call it once: two cores of one setup would share the state of policies and beliefs."""
        return Core(self.application.graph, self.beliefs, self.system.policies, self.application.cluster)


def set_up(application: Application, choice: SystemChoice | None = None, *, must_fit: bool = True) -> Setup:
    """The setup of an application with its declared system, or with `choice`.

    InputError for a variant without a profile, for a system that cannot plan for this application and, with `must_fit`,
    for a plan with a replica that fits on no node. `sloop plan` sets `must_fit=False`, to explain what is missing.
    """
    if choice is not None:
        application = replace(application, system=choice)
    choice = application.system
    in_file = application.declared(choice.path, choice.parameters)
    declared = in_file if choice.path else Value(choice.parameters, "system")
    setup = Setup(application, build_system(choice.name, declared), beliefs_of(application))
    _rehearse(setup, declared, must_fit=must_fit)
    return setup


def _rehearse(setup: Setup, declared: Value, *, must_fit: bool) -> None:
    """Let a core make its first plan, so that an impossible plan is refused before anything starts.

    `declared` is the place of the system in the application's file.
    """
    core = Setup(setup.application, setup.system.fresh(), setup.beliefs).core()
    empty_nodes = core.state.ledger.views()
    with placed(declared):
        core.handle(0, WOKE)
    if core.plan is None:
        return
    for group in (group for target in core.plan.stages for group in target.groups):
        if group.count < 0:
            wanted = f"{group.count} replicas of {group.spec.stage}/{group.spec.variant}"
            declared.fail(f"system {setup.system.name} wants {wanted}", "correct its scaling policy")
    if not empty_nodes or not must_fit:
        return
    for spec in (group.spec for target in core.plan.stages for group in target.groups):
        memory_bytes = setup.beliefs[spec.stage, spec.variant].memory_bytes
        allowed = [node for node in empty_nodes if spec.node in (None, node.node.name)]
        if not any(fits(spec, memory_bytes, node) for node in allowed):
            wanted = f"{spec.stage}/{spec.variant} with {_size(spec.cores, memory_bytes, spec.device)}"
            what = f"system {setup.system.name} wants replicas of {wanted}, which no node could hold"
            declared.fail(what, f"the largest node, {_largest(setup.application.cluster)}")


def _largest(nodes: Sequence[Node]) -> str:
    node = max(nodes, key=lambda node: (node.cores, node.memory_bytes))
    return f"{node.name}, has {_size(node.cores, node.memory_bytes, ', '.join(node.devices))}"


def _size(cores: float, memory_bytes: int, devices: str) -> str:
    memory = f", {memory_bytes / GIB:.3g} GiB" if GIB / 1000 <= memory_bytes < ANY_BYTES else ""
    return counted(cores, "core") + memory + (f", {devices}" if devices else "")


def beliefs_of(application: Application) -> dict[tuple[str, str], Estimate]:
    """A fresh estimate for every (stage, variant). InputError for a variant without a profile."""
    found: dict[tuple[str, str], Estimate] = {}
    for index, stage in enumerate(application.stages):
        for variant in stage.variants:
            if variant.profile is None:
                raise InputError(
                    f"{stage.name}/{variant.name} has no profile, so its speed is unknown",
                    where=application.locate(f"stages[{index}]"),
                    help=f"measure it with `sloop profile {variant.model or 'MODEL'}`",
                )
            chosen = application.estimates
            found[stage.name, variant.name] = Estimate(
                variant.profile, accuracy=variant.accuracy, margin=chosen.margin, correct=chosen.correct
            )
    return found
