"""Profiles of models that have none when a server starts: kept from an earlier start, or measured briefly.

A profile is kept beside its model, as `sloop profile` does, or in the server's state folder where that place cannot be
written. Nothing of the server runs while a model is measured.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from sloop.app.application import Application, Deployment, Variant
from sloop.errors import InputError, MachineError
from sloop.profile.examine import ExaminedModel
from sloop.profile.measure import measure_briefly
from sloop.profile.profile import (
    SUFFIX,
    Profile,
    Sample,
    digest_of_model,
    is_of,
    load_profile,
    path_beside,
    save_profile,
)
from sloop.serve.cpu_quota import confined

PROFILES: Final = "profiles"
"""The folder, in a state folder, of profiles of models whose own folder cannot be written."""


@dataclass(frozen=True, slots=True)
class FirstProfile:
    """A profile that was found or made for a model, and the file in which it is kept."""

    model: Path
    profile: Profile
    file: Path


def without_profile(deployment: Deployment) -> tuple[Path, ...]:
    """The model files of a deployment that have no profile at all, each once."""
    return tuple(
        dict.fromkeys(
            Path(variant.model)
            for application in deployment.applications
            for stage in application.stages
            for variant in stage.variants
            if variant.model is not None and variant.profile is None and not variant.profiles
        )
    )


def kept_profile(model: Path, folder: Path) -> FirstProfile | None:
    """The profile that an earlier start kept in the state folder; None if there is none of this model as it is now."""
    file = _file_in(folder, model)
    try:
        profile = load_profile(file)
    except InputError:  # none, or of another version of sloop
        return None
    return FirstProfile(model, profile, file) if is_of(profile, model) else None


def first_profile(
    model: Path,
    known: ExaminedModel,
    shapes: Mapping[str, tuple[int, ...]],
    folder: Path,
    progress: Callable[[float, Sample], None] = lambda share, sample: None,
) -> FirstProfile:
    """Measure a model briefly (`measure_briefly`), and keep the profile. InputError and MachineError as for `measure`,
    and if it can be kept nowhere."""
    profile = measure_briefly(
        model,
        file=Path(known.file),
        batches=known.batches_alone or None,
        shapes=dict(shapes),
        limit=confined,
        progress=progress,
    )
    try:
        file = path_beside(model)
        save_profile(profile, file)
    except MachineError:
        file = _file_in(folder, model)
        file.parent.mkdir(parents=True, exist_ok=True)
        save_profile(profile, file)
    return FirstProfile(model, profile, file)


def _file_in(folder: Path, model: Path) -> Path:
    return folder / PROFILES / f"{model.name}.{digest_of_model(model)[:12]}{SUFFIX}"


def with_profiles(deployment: Deployment, found: Mapping[Path, FirstProfile]) -> Deployment:
    """The deployment in which variants without a profile have the one of their model."""

    def of_variant(variant: Variant) -> Variant:
        first = found.get(Path(variant.model)) if variant.model is not None else None
        if first is None or variant.profile is not None or variant.profiles:
            return variant
        return replace(variant, profile=first.profile, files={"": str(first.file)})

    def of_application(application: Application) -> Application:
        stages = (replace(each, variants=tuple(map(of_variant, each.variants))) for each in application.stages)
        return replace(application, stages=tuple(stages))

    return replace(deployment, applications=tuple(map(of_application, deployment.applications)))
