"""The models of a version as workers open them: copied, examined, and with what their profiles say."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from msgspec import structs

from sloop.app.application import Application, Stage, Variant
from sloop.app.limits import Limits
from sloop.errors import InputError
from sloop.profile.examine import ExaminedModel
from sloop.profile.profile import Profile, path_beside
from sloop.profile.warming import batches_to_warm
from sloop.serve.control.cutting import cut_of, needs_blocks, starts_parts
from sloop.serve.copies import (
    ExaminedModels,
    ModelCopy,
    declared_of,
    has_changed,
    private_copy,
    unprofiled,
)
from sloop.serve.protocols import Servable
from sloop.serve.weights.folder import source_of
from sloop.systems.setup import (
    ApplicationSetup,
    weights_of,
)
from sloop.tensor import Signature

COPIES: Final = "models"
"""The folder, in a state folder, of the private copies of models (`sloop.serve.copies`)."""
VERIFY_FIRST: Final = 100
"""How many of the first requests that share a forward pass each worker runs again, alone."""
Models = Mapping[tuple[str, str], Servable]
"""The model of each stage and variant."""


def signatures_of(application: Application, models: ExaminedModels) -> dict[tuple[str, str], Signature]:
    """By stage and variant, the signatures of an application of several stages, whose tensors must fit together."""
    stages = application.stages if len(application.stages) > 1 else ()
    return {
        (stage.name, variant.name): models.of(Path(variant.model), unprofiled(variant)).signature
        for stage in stages
        for variant in stage.variants
        if variant.model is not None
    }


def models_of(
    setup: ApplicationSetup,
    limits: Limits,
    folder: Path,
    *,
    must_run: bool = False,
    examined: ExaminedModels | None = None,
) -> dict[tuple[str, str], Servable]:
    """The models of an application for its system, with these limits of the server. All else is as in
    `servables_of`."""
    return servables_of(
        *(setup.application, folder),
        in_blocks=needs_blocks(setup),
        in_parts=starts_parts(setup),
        must_run=must_run,
        worker_bytes=limits.worker_bytes,
        examined=examined,
    )


def servables_of(
    application: Application,
    folder: Path,
    *,
    in_blocks: bool = False,
    in_parts: bool = False,
    must_run: bool = False,
    worker_bytes: int = 0,
    examined: ExaminedModels | None = None,
) -> dict[tuple[str, str], Servable]:
    """The model and signature of every variant, read from its file, and its blocks if it is to be served `in_blocks`,
    so that its replicas can have shadows, or `in_parts`, so that they can start as parts of one model. Raises
    `InputError` for a variant without a model, or one that cannot be cut.

    The files are copied into the state folder `folder`; these private copies are examined, and opened later. `examined`
    has those that were examined a moment ago.
    """
    examined = examined or ExaminedModels(folder / COPIES)
    found: dict[tuple[str, str], Servable] = {}
    called = weights_of(application)
    for index, stage in enumerate(application.stages):
        for variant in stage.variants:
            if variant.model is None:
                raise InputError(
                    f"variant {variant.name!r} of stage {stage.name!r} has no model",
                    where=application.locate(f"stages[{index}]"),
                    help="add `model: FILE` to serve it; a variant with only a profile can be planned and simulated",
                )
            profiles = application.profiles_of(variant)
            with private_copy(Path(variant.model), folder / COPIES) as copy:
                _check_profiles(variant, profiles, copy)
                made = _servable(
                    copy,
                    variant,
                    profiles,
                    application.verify,
                    in_blocks=in_blocks,
                    in_parts=in_parts,
                    must_run=must_run,
                    examined=examined,
                )
            weights = dict.fromkeys(called[stage.name, variant.name, kind] for kind in profiles)
            most_bytes = application.limits.worker_bytes or worker_bytes
            made = structs.replace(made, weights=tuple(weights), worker_bytes=most_bytes)
            found[stage.name, variant.name] = made
    return found


def _check_profiles(variant: Variant, profiles: Mapping[str, Profile], copy: ModelCopy) -> None:
    """InputError if a profile beside the model is of other bytes than those that are served: the model has changed
    since the application was read."""
    for hardware, profile in profiles.items():
        file = path_beside(copy.original, hardware if hardware in variant.profiles else "")
        if variant.file_on(hardware) == str(file) and profile.model_digest not in ("", copy.model_digest):
            what = f"its profile {file.name!r} was measured on another version of this model"
            again = f"measure it again with `sloop profile {copy.original}`, or remove {file.name!r}"
            raise InputError(what, where=str(copy.original), help=again)


def _servable(
    copy: ModelCopy,
    variant: Variant,
    profiles: Mapping[str, Profile],
    verify: float | None,
    *,
    in_blocks: bool,
    in_parts: bool,
    must_run: bool,
    examined: ExaminedModels,
) -> Servable:
    """A model as it is examined in its private copy."""
    shapes = next((profile.shapes for profile in profiles.values() if profile.shapes), None)
    known = examined.examined(copy, shapes or {}, declared_of(variant, copy))
    if must_run and known.fault is not None:
        raise known.fault.error
    first, share = _verified(variant, verify, known)
    cut = None
    if in_blocks or in_parts:
        cut = cut_of(known, profiles, shapes or {}, copy.folder, for_shadows=in_blocks)
    name = copy.original.name
    # Blocks of a model are run with its weights as they are.
    signature = known.signature if cut is None else structs.replace(known.signature, optional=())
    return Servable(
        *(known.file, signature, known.obstacle, known.labels),
        notes=(
            *known.notes,
            *([f"{name}: {copy.why_not}; your file itself is opened, and checked each time"] if copy.why_not else []),
            *([f"{name} has changed since an earlier run of this server"] if has_changed(copy) else []),
        ),
        source=source_of(copy.original),
        cut=cut,
        changes=known.changes,
        device_bytes={kind: each.device_memory_bytes for kind, each in profiles.items() if each.accelerator},
        batch_max={kind: each.max_batch for kind, each in profiles.items()},
        original=str(copy.original),
        digest=copy.digest,
        files=copy.files,
        evidence=known.evidence,
        batches=known.batches_alone or batches_to_warm(_batches_in(profiles.values())),
        shapes=shapes or {},
        verify_first=first,
        verify_share=share,
        operators=variant.operators,
        memory_bytes={kind: each.memory_bytes for kind, each in profiles.items()},
        padding=known.padding,
    )


def _verified(variant: Variant, verify: float | None, known: ExaminedModel) -> tuple[int, float]:
    """How many of the first requests that share a forward pass are run again, and which share of the others. Both are 0
    for a model that draws random numbers, and, without `verify`, if the user says that rows may be joined."""
    if known.obstacle or verify == 0 or (verify is None and variant.joins_rows) or known.is_random:
        return 0, 0.0
    return VERIFY_FIRST, verify or 0.0


def _batches_in(profiles: Iterable[Profile]) -> set[int]:
    """The batch sizes that were measured, up to the largest that is served."""
    largest = max((profile.max_batch for profile in profiles), default=1)
    measured = {sample.batch for profile in profiles for sample in profile.samples}
    return {largest, *(size for size in measured if size < largest)}


def runs_alone(models: Models) -> Callable[[Application, Stage, Variant], bool]:
    """Whether requests for a variant cannot share a forward pass."""
    return lambda _, stage, variant: bool(models[stage.name, variant.name].obstacle)
