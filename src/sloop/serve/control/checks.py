"""What a server refuses to serve, or serves with a warning."""

from sloop.app.hardware import foreign_profiles
from sloop.errors import InputError
from sloop.profile.examine import joining_text
from sloop.serve.control.cutting import WITHOUT_PARTS, WITHOUT_SHADOWS, needs_blocks, starts_parts
from sloop.serve.control.servables import Models
from sloop.systems.setup import (
    ApplicationSetup,
    weights_of,
)
from sloop.tensor import Signature, described
from sloop.units import GIB
from sloop.vocabulary import Canary


def check_live(setup: ApplicationSetup) -> None:
    """InputError for a system that cannot run in a server."""
    if starts_parts(setup) and needs_blocks(setup):
        raise InputError(
            f"system {setup.system.name!r} attaches shadows, and its `provision` policy starts parts of models",
            where=setup.application.system.declared.where,
            help=f"no server does both: {WITHOUT_SHADOWS}, or {WITHOUT_PARTS}",
        )
    if starts_parts(setup):
        check_memory_of_parts(setup)
    if "live" not in setup.system.runs:
        raise InputError(
            f"system {setup.system.name!r} runs in the simulator only",
            where=setup.application.system.declared.where,
            help="`sloop systems` shows which ones run live",
        )


def check_memory_of_parts(setup: ApplicationSetup) -> None:
    """InputError for a model of which no node can hold a whole replica beside the files. A part needs that memory when
    it loads the other layers."""
    application = setup.application
    for (stage, variant, hardware), weights in weights_of(application).items() if application.cluster else ():
        needed_bytes = setup.beliefs[stage, variant, hardware].memory_bytes + weights.size_bytes
        largest_bytes = max([node.memory_bytes for node in application.cluster if node.hardware == hardware], default=0)
        if needed_bytes > largest_bytes:
            what = (
                f"a part of {variant!r} needs {needed_bytes / GIB:.3g} GiB when it has all layers, its files included"
            )
            raise InputError(
                f"{what}; the largest node of kind {hardware!r} has {largest_bytes / GIB:.3g} GiB",
                where=setup.application.system.declared.where,
                help=f"name nodes with more memory, or {WITHOUT_PARTS}",
            )


def check_weights(setup: ApplicationSetup, models: Models) -> None:
    """InputError for a model that nodes cannot fetch, if the system orders transfers. A server that starts parts of
    models sends nodes the blocks into which it has cut them."""
    application = setup.application
    if starts_parts(setup):
        return
    for index, stage in enumerate(application.stages):
        for variant in stage.variants:
            if not (models[stage.name, variant.name].source or not setup.system.policies.provision.brings_weights):
                raise InputError(
                    f"the `provision` policy brings {variant.name!r} to its nodes, but it was not fetched from a store",
                    where=application.locate(f"stages[{index}]"),
                    help="name its model by URL, or write `provision: as_placed`",
                )


def check_canary(canary: Canary) -> None:
    """InputError for a share or a tolerance that is out of range."""
    for name, value, is_right in (
        ("the share of a canary", canary.share, 0 < canary.share < 1),
        ("the tolerance", canary.tolerance, 0 <= canary.tolerance <= 1),
        ("the time until a canary is promoted", canary.promote_after_s, canary.promote_after_s >= 0),
    ):
        if not is_right:
            raise InputError(f"{name} is {value:g}", help="shares are above 0 and below 1, and nothing is negative")


def check_same(new: Signature, old: Signature, of: str) -> None:
    """InputError if clients of the old signature could not use the new one."""
    for kind in ("inputs", "outputs"):
        ours, theirs = getattr(new, kind), getattr(old, kind)
        if ours != theirs:
            raise InputError(
                f"its {kind} are {described(ours)}; those of {of}, are {described(theirs)}",
                help="clients would notice: deploy it under another name",
            )
    gone = [port for port in old.optional if port not in new.optional]
    if gone:
        what = f"it does not take the optional inputs {described(gone)}; {of}, takes them"
        raise InputError(what, help="clients would notice: deploy it under another name")
    if new.rows_max < old.rows_max:
        raise InputError(
            f"it takes requests of at most {new.rows_max} rows; {of}, takes {old.rows_max}",
            help=f"write `limits: {{rows: {old.rows_max}}}`, or deploy it under another name",
        )


def warnings_of(setup: ApplicationSetup, models: Models) -> list[str]:
    """What a user should know before this version serves."""
    found = [*setup.application.overruled, *foreign_profiles(setup.application)]
    for each in setup.application.stages:
        found += [note for variant in each.variants for note in models[each.name, variant.name].notes]
    for each in setup.application.stages:
        for variant in each.variants:
            model = models[each.name, variant.name]
            if model.obstacle:
                found.append(f"{variant.model}: {joining_text(model.obstacle, '')}")
    return found
