"""From an application to a core: what both drivers, planning and replay begin with.

Promises that a setup is fresh: its policies and beliefs have seen nothing. Knows no driver, no clock, no file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from sloop.app.application import Application, SystemChoice
from sloop.core import Core
from sloop.errors import InputError
from sloop.profile.estimate import Estimate
from sloop.systems import build_system
from sloop.systems.system import System


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything a driver needs to know before a run; `beliefs` and the policies in `system` are fresh."""

    application: Application
    system: System
    beliefs: Mapping[tuple[str, str], Estimate]

    def core(self) -> Core:
        """The core of this run. One for each setup: policies and beliefs have memories."""
        return Core(self.application, self.beliefs, self.system.policies, self.application.cluster)


def set_up(application: Application, choice: SystemChoice | None = None) -> Setup:
    """An application under the system it names, or under `choice`. InputError for a variant without a profile."""
    if choice is not None:
        application = replace(application, system=choice)
    choice = application.system
    system = build_system(choice.name, choice.parameters, where=lambda key: application.locate(f"{choice.path}.{key}"))
    return Setup(application, system, beliefs_of(application))


def beliefs_of(application: Application) -> dict[tuple[str, str], Estimate]:
    """An estimate for every (stage, variant), fresh. InputError for a variant without a profile."""
    found: dict[tuple[str, str], Estimate] = {}
    for index, stage in enumerate(application.stages):
        for variant in stage.variants:
            if variant.profile is None:
                raise InputError(
                    f"nothing is known of the speed of {variant.name!r}",
                    where=application.locate(f"stages[{index}]"),
                    help=f"measure it with `sloop profile {variant.model}`",
                )
            chosen = application.estimates
            found[stage.name, variant.name] = Estimate(
                variant.profile, accuracy=variant.accuracy, margin=chosen.margin, correct=chosen.correct
            )
    return found
