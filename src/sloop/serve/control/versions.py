"""A version of an application as the driver, the edges and the workers of a server know it."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Final

from msgspec import structs

from sloop.app.application import Application
from sloop.app.graph import declared_name
from sloop.app.limits import ROWS_MAX, Limits
from sloop.machine import capacity
from sloop.serve.control.checks import check_live, check_weights
from sloop.serve.control.servables import Models
from sloop.serve.dataflow import StageWiring, Wiring, wire
from sloop.serve.driver import ServedVersion
from sloop.serve.messages import OfferModel
from sloop.serve.protocols import VariantJoining
from sloop.systems.setup import (
    ApplicationSetup,
)

LABELS_BYTES_MAX: Final = 2**20


def version_of(setup: ApplicationSetup, models: Models, limits: Limits) -> ServedVersion:
    """The version as the driver serves it, with its own of these models, and the limits of the server. InputError if it
    cannot be served."""
    check_live(setup)
    application = setup.application
    own = {key: model for key, model in models.items() if key[0] in application.by_name}
    check_weights(setup, own)
    return served_version(application, own, rows_of(application, limits))


def served_version(application: Application, models: Models, rows: int) -> ServedVersion:
    """The version as the driver serves it, with requests of at most `rows` rows. InputError if the tensors of its
    models do not fit together."""
    signatures = {key: model.signature for key, model in models.items()}
    whole = {stage for (stage, _), model in models.items() if model.obstacle}
    wiring = wire(application.graph, signatures, rows_max=rows, whole=whole, where=application.file)
    wiring = replace(wiring, signature=structs.replace(wiring.signature, size_max=application.size_max))
    labels = labels_of(application, wiring, models)
    joining = {
        (stage, variant): VariantJoining(declared_name(stage), variant, model.obstacle, model.evidence)
        for (stage, variant), model in models.items()
    }
    named = (application.key, application.name, application.version)
    return ServedVersion(*named, application.slo_ns, wiring, labels, joining)


def labels_of(application: Application, wiring: Wiring, models: Models) -> dict[str, tuple[str, ...]]:
    """By output, the names of its classes: those that the application declares, otherwise those that a model has.
    InputError for a file or an output that there is not."""
    found: dict[str, tuple[str, ...]] = {}
    for port, sources in zip(wiring.signature.outputs, wiring.outputs, strict=True):
        for source in sources:
            for (stage, _), model in models.items():
                name = model.signature.outputs[source.position].name if stage == source.stage else ""
                if name in model.labels:
                    found.setdefault(port.name, model.labels[name])
    outputs = [port.name for port in wiring.signature.outputs]
    for name, file in application.labels.items():
        declared = application.declared(f"labels.{name}", file)
        if name not in outputs:
            declared.fail(f"the application has no output {name!r}", f"its outputs are {', '.join(outputs)}")
        try:
            with Path(file).open("rb") as opened:
                raw = opened.read(LABELS_BYTES_MAX + 1)
            if len(raw) > LABELS_BYTES_MAX:
                raise ValueError(f"more than {LABELS_BYTES_MAX} bytes")
            found[name] = tuple(raw.decode().splitlines())
        except (OSError, ValueError) as error:
            declared.fail(f"the labels cannot be read: {error}", "write one label a line, in UTF-8")
    return found


def rows_of(application: Application, limits: Limits) -> int:
    """The most rows of one request, with these limits of the server. It is a setting, not the largest batch of a
    profile: larger requests run in pieces."""
    return application.limits.rows or limits.rows or ROWS_MAX


def threads_of(setup: ApplicationSetup) -> int:
    """The largest thread count that a replica can be resized to; 0 if the system never does that."""
    if not setup.system.resizes:
        return 0
    return ceil(min(capacity().cores, max(belief.cores_max for belief in setup.beliefs.values())))


def offer_of(application: Application, versions: Sequence[ServedVersion], serving: Sequence[str]) -> OfferModel:
    """The application as the edges offer it: all its versions, and the names of those that serve requests."""
    joining = {
        f"{each.stage}:{each.variant}": f"no: {each.obstacle}" if each.obstacle else f"yes: {each.evidence}"
        for each in versions[0].joining.values()
    }
    return OfferModel(
        application.name,
        application.slo_ns,
        versions[0].wiring.signature,
        application.limits,
        dict(versions[0].labels),
        tuple(serving),
        {served.version: served.wiring.answer for served in versions},
        joining,
    )


def wirings_of(served: ServedVersion) -> dict[str, StageWiring]:
    """What workers must know of each stage of a version."""
    return {stage: served.wiring.of(stage) for stage in served.wiring.inputs}
