"""Versions of applications in a running server: what it takes to serve one, how it is checked, deployed and removed.

A version that is deployed is checked by a process of its own before anything of the server hears of it: its file loads,
every model opens and has a profile, its system is the server's and has a plan that fits the cluster. Reading models and
planning would stop the event loop for seconds, and a model's library may crash. Then the server compares the signature
with that of the version that serves. Whatever is wrong is an error of the order; what serves goes on serving.
"""

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct, structs

from sloop.actions import Rollout, VersionState
from sloop.app.application import Application, Deployment, Stage, Variant
from sloop.app.document import read_name
from sloop.app.graph import declared_name
from sloop.app.hardware import foreign_profiles
from sloop.app.load import load_application, with_deadline
from sloop.core import Core
from sloop.core.planner import plans_beside
from sloop.core.rollout import ENDING_STATES, SERVING_STATES
from sloop.errors import InputError, MachineError, SloopError
from sloop.events import Deployed, Planned, Promoted, Removed
from sloop.machine import capacity
from sloop.options import Value
from sloop.profile.examine import ExaminedModel, joining_text
from sloop.profile.layers import kept_pieces
from sloop.profile.onnx_cut import ModelPiece, data_file
from sloop.profile.profile import Profile, path_beside
from sloop.profile.warming import sizes_to_warm
from sloop.serve.control import (
    ORDERS_MAX,
    Comparison,
    Deploy,
    Done,
    ListVersions,
    Order,
    Promote,
    Remove,
    Tell,
    VersionStatus,
)
from sloop.serve.copies import (
    ExaminedModels,
    ModelCopy,
    VersionFiles,
    declared_of,
    has_changed,
    private_copy,
    unprofiled,
)
from sloop.serve.dataflow import StageWiring, Wiring, wire
from sloop.serve.driver import Driver, ServedVersion
from sloop.serve.edge.refusal import Refusal
from sloop.serve.edge.service import NAMES_MAX
from sloop.serve.edges import Edges
from sloop.serve.insight import LEAVING, Insight
from sloop.serve.messages import CutBlock, OfferModel, VariantJoining
from sloop.serve.planner import Definition, PlannerProcess
from sloop.serve.processes import begin, kill, spawn
from sloop.serve.protocols import Backend, CutModel, ModelState, Readiness, Servable
from sloop.serve.weights.folder import source_of
from sloop.systems.setup import (
    ApplicationSetup,
    application_in,
    build,
    definition_of,
    set_up,
    weights_of,
    with_lone_requests,
)
from sloop.tensor import Signature, described
from sloop.text import listed, quoted
from sloop.units import GIB
from sloop.vocabulary import Canary, Life, version_key

WITHOUT_SHADOWS: Final = "write `shadows: false`, or choose a system without shadows"
WITHOUT_PARTS: Final = "write `partition: false` in its `provision`: each replica starts with its whole model"
COPIES: Final = "models"
"""The folder, in a state folder, of the private copies of models (`sloop.serve.copies`)."""
CHECK_S_MAX: Final = 600.0
"""Seconds for the check of a version; it opens every model and makes a plan."""
WAIT_S_MAX: Final = 600.0
"""Seconds that an order waits for a version to serve, or to end."""
STATUS_S: Final = 0.2
"""How often to look whether a version is ready; states of rollouts are noticed at once."""
ROWS_MAX: Final = 1024
"""The most rows of one request, unless a file says otherwise. They are 64 forward passes of 16 rows each, which take
an ordinary model seconds on a core: a larger request would delay all others, and hardly meet its own deadline."""
NICE: Final = 19
LABELS_BYTES_MAX: Final = 2**20
VERIFY_FIRST: Final = 100
"""How many of the first requests that share a forward pass each worker runs again, alone."""
APPLICATION_FILE: Final = ".yaml"
TRITON_STATES: Final = {
    "": "UNLOADING",
    ModelState.READY: "READY",
    ModelState.RESTING: "READY",
    ModelState.WAKING: "READY",
    ModelState.STARTING: "LOADING",
    ModelState.FAILING: "UNAVAILABLE",
    ModelState.WAITING: "UNAVAILABLE",
    ModelState.STOPPING: "UNLOADING",
}
"""Triton's words for the states of models; a version without one has ended, or ends."""
ENDED_KEPT: Final = 100
RETRY_S_MIN, RETRY_S_MAX = 10.0, 600.0
"""Between two attempts to load an application that could not be loaded at the server's start; each waits twice as long
as the one before. An attempt examines the model, in a process of the lowest priority but one."""

_log: Final = logging.getLogger("sloop.deploy")

Models = Mapping[tuple[str, str], Servable]
"""The model of each stage and variant."""


# What it takes to serve a version


def signatures_of(application: Application, models: ExaminedModels) -> dict[tuple[str, str], Signature]:
    """By stage and variant, the signatures of an application of several stages, whose tensors must fit together."""
    stages = application.stages if len(application.stages) > 1 else ()
    return {
        (stage.name, variant.name): models.of(Path(variant.model), unprofiled(variant)).signature
        for stage in stages
        for variant in stage.variants
        if variant.model is not None
    }


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
        batches=known.batches_alone or sizes_to_warm(_sizes_in(profiles.values())),
        shapes=shapes or {},
        verify_first=first,
        verify_share=share,
        operators=variant.operators,
        memory_bytes={kind: each.memory_bytes for kind, each in profiles.items()},
    )


def _verified(variant: Variant, verify: float | None, known: ExaminedModel) -> tuple[int, float]:
    """How many of the first requests that share a forward pass are run again, and which share of the others. Both are 0
    for a model that draws random numbers, and, without `verify`, if the user says that rows may be joined."""
    if known.obstacle or verify == 0 or (verify is None and variant.joins_rows) or known.is_random:
        return 0, 0.0
    return VERIFY_FIRST, verify or 0.0


def _sizes_in(profiles: Iterable[Profile]) -> set[int]:
    """The batch sizes that were measured, up to the largest that is served."""
    largest = max((profile.max_batch for profile in profiles), default=1)
    measured = {sample.batch for profile in profiles for sample in profile.samples}
    return {largest, *(size for size in measured if size < largest)}


def runs_alone(models: Models) -> Callable[[Application, Stage, Variant], bool]:
    """Whether requests for a variant cannot share a forward pass."""
    return lambda _, stage, variant: bool(models[stage.name, variant.name].obstacle)


def cut_of(
    known: ExaminedModel,
    profiles: Mapping[str, Profile],
    shapes: Mapping[str, tuple[int, ...]],
    folder: Path,
    *,
    for_shadows: bool = True,
) -> CutModel:
    """The blocks of a model, for shadows or for parts of pipelines; their files are kept in `folder`.
    InputError for a model that has no measured blocks, or whose rows cannot be divided."""
    path = Path(known.file)
    without = WITHOUT_SHADOWS if for_shadows else WITHOUT_PARTS
    if known.obstacle:
        who = "a shadow computes rows of a batch" if for_shadows else "parts of a model are tried with rows of a batch"
        what = f"{who}, but requests for this model cannot share one: {known.obstacle}"
        raise InputError(what, where=str(path), help=without)
    devices = [profile.accelerator for profile in profiles.values() if profile.accelerator]
    if devices and not for_shadows:
        what = f"parts of a model run on CPU cores only, and a profile of this one is for {listed(devices)}"
        raise InputError(what, where=str(path), help=without)
    layers = {hardware: profile.layers for hardware, profile in profiles.items() if profile.layers is not None}
    if not layers:
        who = "attaches shadows, which hold" if for_shadows else "starts replicas as parts of a model, which hold"
        what = f"the system {who} blocks of a model, but the blocks of this one were not measured"
        raise InputError(what, where=str(path), help=f"measure them with `sloop profile MODEL --layers`, or {without}")
    ends = {tuple(block.end for block in each.blocks) for each in layers.values()}
    if len(ends) > 1:
        what = f"its profiles for {listed(sorted(layers))} have different blocks"
        raise InputError(
            what, where=str(path), help="measure all with the same cuts: `sloop profile MODEL --layers --cut …`"
        )
    pieces = kept_pieces(path, next(iter(ends)), shapes, folder, divides_rows=for_shadows)
    blocks = tuple(map(_block_of, pieces))
    return CutModel(blocks, layers, max(profile.max_batch for profile in profiles.values()), for_shadows)


def _block_of(piece: ModelPiece) -> CutBlock:
    """A piece of a model, as workers are told of it."""
    file = Path(piece.file).absolute()
    source = f"{file}#sha256={piece.checksums[file.name]}"
    weights = piece.checksums.get(data_file(file).name, "")
    return CutBlock(piece.file, piece.inputs, piece.outputs, piece.crossing, source, weights)


def needs_blocks(setup: ApplicationSetup) -> bool:
    """Whether the application's system attaches shadows to replicas."""
    return setup.system.policies.scale.attaches_shadows


def starts_parts(setup: ApplicationSetup) -> bool:
    """Whether replicas of the application may start as parts of one model."""
    return setup.system.policies.provision.partition


def served_version(application: Application, models: Models, rows: int) -> ServedVersion:
    """The version as the driver serves it, with requests of at most `rows` rows. InputError if the tensors of its
    models do not fit together."""
    signatures = {key: model.signature for key, model in models.items()}
    wiring = wire(application.graph, signatures, rows_max=rows, where=application.file)
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


def rows_of(application: Application, deployment: Deployment) -> int:
    """The most rows of one request. It is a setting, not the largest batch of a profile: workers divide requests."""
    return application.limits.rows or deployment.limits.rows or ROWS_MAX


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


def threads_of(setup: ApplicationSetup) -> int:
    """The largest thread count that a replica can be resized to; 0 if the system never does that."""
    if not setup.system.policies.scale.resizes:
        return 0
    return ceil(min(capacity().cores, max(belief.cores_max for belief in setup.beliefs.values())))


def offer_of(application: Application, versions: Sequence[ServedVersion], serving: Sequence[str]) -> OfferModel:
    """The application as the edges offer it: all its versions, and the names of those that serve requests."""
    return OfferModel(
        application.name,
        application.slo_ns,
        versions[0].wiring.signature,
        application.limits,
        dict(versions[0].labels),
        tuple(serving),
        {served.version: served.wiring.answer for served in versions},
        tuple(versions[0].joining.values()),
    )


def wirings_of(served: ServedVersion) -> dict[str, StageWiring]:
    """What workers must know of each stage of a version."""
    return {stage: served.wiring.of(stage) for stage in served.wiring.inputs}


# The check of a version, in a process of its own


class CheckOrder(Struct, frozen=True):
    """What the process is to check: a file, as a version of its application in a running deployment."""

    file: str
    version: str
    """Empty for the next number."""
    next_versions: dict[str, str]
    """By application, the next number; "1" for others."""
    deployment: dict[str, Any]
    """Its system and cluster; without applications."""
    folder: str
    """The server's state folder."""
    definition: dict[str, Any] | None = None
    """The application version instead of the file's, joined with the deployment already."""


class AcceptedVersion(Struct, frozen=True, tag="accepted"):
    """A version that can be served, with everything that the server needs of it."""

    definition: dict[str, Any]
    models: tuple[tuple[str, str, Servable], ...]
    """Each with its stage and variant."""
    rows_max: int
    threads: int
    warnings: tuple[str, ...]

    def served(self) -> tuple[Application, Models, ServedVersion]:
        """The application, its models, and how the driver serves it."""
        application = application_in(self.definition)
        models = {(stage, variant): model for stage, variant, model in self.models}
        return application, models, served_version(application, models, self.rows_max)


class RefusedVersion(Struct, frozen=True, tag="refused"):
    """A version that cannot be served: the fields of a `SloopError`."""

    what: str
    help: str


def check_version(order: CheckOrder) -> AcceptedVersion:
    """The version if it can be served. SloopError if it cannot."""
    deployment = msgspec.convert(order.deployment, Deployment, strict=False)
    if order.definition is not None:
        application = joined = replace(application_in(order.definition), cluster=deployment.cluster)
    else:
        application = load_application(order.file, cluster=deployment.cluster)
        version = order.version or order.next_versions.get(application.name, "1")
        joined = deployment.joined_by(application).qualified(version)
    whole = set_up(replace(deployment, applications=(joined,)))
    (setup,) = whole.applications
    check_live(setup)
    blocks, parts = needs_blocks(setup), starts_parts(setup)
    most_bytes = deployment.limits.worker_bytes
    models = servables_of(
        joined, Path(order.folder), in_blocks=blocks, in_parts=parts, must_run=True, worker_bytes=most_bytes
    )
    (setup,) = with_lone_requests(whole, runs_alone(models)).applications
    check_weights(setup, models)
    rows = rows_of(joined, deployment)
    served_version(joined, models, rows)
    return AcceptedVersion(
        definition=definition_of(setup),
        models=tuple((*key, model) for key, model in models.items()),
        rows_max=rows,
        threads=threads_of(setup),
        warnings=(*filter(None, (with_deadline(application)[1],)), *warnings_of(setup, models)),
    )


async def checked(order: CheckOrder) -> AcceptedVersion:
    """`check_version` in a process of its own. Raises what it raises, and MachineError if the process dies."""
    process = spawn("sloop.serve.deploy", [os.getpid()], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    talk = asyncio.get_running_loop().run_in_executor(None, process.communicate, msgspec.json.encode(order))
    try:
        async with asyncio.timeout(CHECK_S_MAX):
            answer, _ = await asyncio.shield(talk)
    except TimeoutError as error:
        what = f"{order.file}: the check has taken more than {CHECK_S_MAX:g} s"
        raise InputError(what, help="a model may wait for something when it is opened") from error
    finally:
        if process.poll() is None:
            kill(process.pid)
        await asyncio.wait((talk,))
    try:
        found = msgspec.json.decode(answer, type=AcceptedVersion | RefusedVersion)
    except msgspec.DecodeError as error:
        what = f"{order.file}: the process that checked it ended with exit status {process.returncode}"
        raise MachineError(what, help="see the server's messages; it may have run out of memory") from error
    if isinstance(found, RefusedVersion):
        raise InputError(found.what, help=found.help)
    return found


def main(arguments: Sequence[str]) -> None:
    """Entry point of the process: reads a `CheckOrder` from stdin, and writes the answer to stdout."""
    begin(int(arguments[0]), ())
    os.nice(NICE)
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # what libraries print
        try:
            order = msgspec.json.decode(sys.stdin.buffer.read(), type=CheckOrder)
            found: AcceptedVersion | RefusedVersion = check_version(order)
        except SloopError as error:
            found = RefusedVersion(str(error.args[0]), error.help)
        out.write(msgspec.json.encode(found))


# Orders


@dataclass(frozen=True, slots=True)
class UnloadedModel:
    """An application that a server was to serve from its start, and could not load."""

    why: str
    file: str
    definition: dict[str, Any] | None = None
    """With which it is tried again; None if not even its speed is known."""


class Deployer:
    """Carries out the orders of `sloop deploy` in a running server."""

    def __init__(
        self,
        deployment: Deployment,
        core: Core,
        driver: Driver,
        backend: Backend,
        planner: PlannerProcess,
        edges: Edges,
        insight: Insight,
        folder: Path,
    ) -> None:
        self._folder = folder
        self._files = VersionFiles(folder / COPIES)
        self._deployment = replace(deployment, applications=(), lines={})
        self._core, self._driver, self._backend, self._planner = core, driver, backend, planner
        self._edges, self._insight = edges, insight
        self._applications = {application.key: application for application in deployment.applications}
        """The versions that have not ended, by key."""
        self._used: dict[str, set[str]] = {}
        """By application, all versions that ever were: their keys must be unique in the log."""
        for application in deployment.applications:
            self._used.setdefault(application.name, set()).add(application.version)
        self._last: dict[tuple[str, str], Rollout] = {}
        """By application and version, the last change of its rollout; of versions that have ended, only of the newest
        `ENDED_KEPT`, for the orders that wait for their end."""
        self._gone: deque[tuple[str, str]] = deque()
        """The versions in `_last` that have ended, oldest first."""
        self._ended: dict[str, Rollout] = {}
        """By application, the end of the version that ended last."""
        self._changed = asyncio.Event()
        driver.on_rollout, driver.on_joining_ended = self._on_rollout, self._offer
        self._deploying = asyncio.Lock()

    @property
    def refused(self) -> Mapping[str, Readiness]:
        """By name, the applications that are to serve and cannot be loaded."""
        return self._insight.refused

    @contextlib.contextmanager
    def keeping(self, models: Models, left_out: Mapping[str, UnloadedModel] = {}) -> Iterator[None]:
        """The files of these models stay as long as a version uses them, and those of the versions that are deployed
        while the block runs; those of others are deleted. The files that they were made from are watched. What is left
        out is tried again, until it serves or an order has deployed it."""
        trying: list[asyncio.Task[None]] = []
        try:
            for application in self._applications.values():
                self._keep(application, models)
            self._files.start()
            for name, each in left_out.items():
                self._refuse(name, each, each.why, RETRY_S_MIN)
                if each.definition is not None:
                    trying.append(asyncio.get_running_loop().create_task(self._try_again(name, each)))
            yield
        finally:
            for attempts in trying:
                attempts.cancel()
            self._files.close()

    def _keep(self, application: Application, models: Models) -> None:
        own = [model for (stage, _), model in models.items() if stage in application.by_name]
        called = f"version {application.version} of {application.name!r}"
        self._files.add(application.key, called, {model.model: model.files for model in own})

    async def handle(self, order: Order, tell: Tell) -> Done:
        """Carry out an order."""
        if self._driver.is_stopped:
            raise MachineError(LEAVING, help="start it again, and then deploy")
        match order:
            case Deploy():
                return await self.deploy(order, tell)
            case Promote():
                return await self.promote(order, tell)
            case Remove():
                return await self.remove(order, tell)
            case ListVersions():
                return Done(self.statuses(), ended=tuple(map(_status, self._ended.values())))

    async def deploy(self, order: Deploy, tell: Tell) -> Done:
        """Start a version, and wait until it serves, is a canary, or is given up."""
        if order.version:
            read_name(Value(order.version, "--version"))
        if order.canary is not None:
            check_canary(order.canary)
        async with self._deploying:  # one after another: the numbers of versions depend on it
            with self._files.checking():
                found = await self._check(order, tell)
                served = self._start(found, order)
        states = (*SERVING_STATES, *ENDING_STATES)
        return await self._until(served.application, served.version, states, SERVING_STATES, tell)

    async def _check(self, order: Deploy, tell: Tell) -> AcceptedVersion:
        tell(f"checking {order.file}")
        numbers = {name: _next_number(used) for name, used in self._used.items()}
        cluster = tuple(self._core.state.ledger.nodes.values())  # as it is now
        described = msgspec.to_builtins(replace(self._deployment, cluster=cluster), str_keys=True)
        found = await checked(CheckOrder(order.file, order.version, numbers, described, str(self._folder.absolute())))
        _, _, served = found.served()
        name, version = served.application, served.version
        if order.application not in ("", name):
            what = f"{order.file}: the application in it is called {name!r}, not {order.application!r}"
            raise InputError(what, help="give the file the name of its application")
        for line in found.warnings:
            _log.warning("%s", line)
            tell(f"note: {line}")
        if version in self._used.get(name, ()):
            fix = f"leave --version out for the next number, {numbers[name]}"
            raise InputError(f"application {name!r} has, or had, a version {version!r}", help=fix)
        serving = self._driver.served(name)
        if serving is None or name not in self._edges.models:
            if order.canary is not None:
                what = f"application {name!r} has no version that could serve the other requests"
                raise InputError(what, help="deploy it without --canary")
            return found
        others = self._core.versions(name)
        for other in others:
            if order.canary is not None and other.canary is not None and other.state in SERVING_STATES:
                fix = f"promote it with `sloop deploy --promote {name}`, or remove it with --remove {name} --version"
                raise InputError(f"version {other.name} of {name!r} is a canary already", help=f"{fix} {other.name}")
        same_as = f"version {serving.version} of {name!r}, which serves"
        check_same(served.wiring.signature, serving.wiring.signature, same_as)
        for other in others:
            if other.state is VersionState.STARTING:
                tell(f"note: version {other.name} of {name!r} is not ready yet; it is given up for version {version}")
            elif other.state is VersionState.CANARY and order.canary is None:
                tell(f"note: version {other.name} of {name!r} is a canary; version {version} will replace it too")
        return found

    def _start(self, found: AcceptedVersion, order: Deploy) -> ServedVersion:
        """Make a checked version known everywhere, the core last."""
        application, models, served = found.served()
        name, version, key = application.name, application.version, application.key
        parts = build(name, version, found.definition)  # raises what would otherwise stop the core
        self._used.setdefault(name, set()).add(version)
        self._applications[key] = application
        self._keep(application, models)
        self._backend.learn(models, wirings_of(served), threads_prepared=found.threads)
        self._driver.add(served)
        self._planner.add(key, Definition(name, version, found.definition))
        scales = [each.parts.policies.scale for each in self._core.state.applications.values()]
        if not self._planner.is_started and plans_beside([*scales, parts.policies.scale]):
            self._planner.start()
            self._driver.on_event(Planned(0, {}, restarted=True))
        known = self._edges.models.get(name)
        if known is None:
            self._edges.offer(offer_of(application, [served], ()))
        else:  # a version that may answer before the core moves it to another state
            self._edges.offer(structs.replace(known, answers=known.answers | {version: served.wiring.answer}))
        self._driver.on_event(Deployed(name, version, found.definition, order.canary))
        self._insight.refused.pop(name, None)
        return served

    def _refuse(self, name: str, left_out: UnloadedModel, why: str, wait_s: float) -> None:
        """Say that an application cannot be loaded."""
        is_tried = left_out.definition is not None
        then = f"next attempt within {wait_s:g} s" if is_tried else "deploy it when that is corrected"
        _log.error("%r is not served: %s; %s", name, why, then)
        self._insight.refused[name] = Readiness(ModelState.FAILING, f"it cannot be loaded: {why}; {then}")

    async def _try_again(self, name: str, left_out: UnloadedModel) -> None:
        """Load an application that could not be loaded at the start, as soon as that is possible."""
        wait_s, described = RETRY_S_MIN, msgspec.to_builtins(self._deployment, str_keys=True)
        order = CheckOrder(left_out.file, "", {}, described, str(self._folder.absolute()), left_out.definition)
        while True:
            await asyncio.sleep(wait_s)
            wait_s = min(RETRY_S_MAX, 2 * wait_s)
            with self._files.checking():
                try:
                    found = await checked(order)  # others may deploy meanwhile: a model that hangs takes minutes
                except SloopError as error:
                    if name in self._insight.refused:
                        self._refuse(name, left_out, error.what, wait_s)
                        continue
                async with self._deploying:
                    if name in self._insight.refused and not self._driver.is_stopped:
                        self._start(found, Deploy(left_out.file))
                        _log.warning("%r is loaded", name)
                return

    async def promote(self, order: Promote, tell: Tell) -> Done:
        """Let a version get all requests, and wait until it does."""
        name = self._known(order.application)
        candidates = [
            version.name
            for version in self._core.versions(name)
            if version.state in (VersionState.CANARY, VersionState.STARTING)
        ]
        if not candidates or order.version not in ("", *candidates):
            of = f"version {order.version} of {name!r}" if order.version else f"no version of {name!r}"
            what = f"{of} {'is not' if order.version else 'is'} a canary or about to be one"
            raise InputError(what, help="`sloop deploy --list` shows all versions")
        version = order.version or candidates[-1]
        self._driver.on_event(Promoted(name, version))
        return await self._until(name, version, (VersionState.SERVING, *ENDING_STATES), (VersionState.SERVING,), tell)

    async def remove(self, order: Remove, tell: Tell) -> Done:
        """End an application, or a version of it, and wait until its open requests are finished."""
        name = self._known(order.application)
        living = [each.name for each in self._core.versions(name) if each.state not in ENDING_STATES]
        if order.version and order.version not in living:
            what = f"application {name!r} has no version {order.version!r} that starts or serves"
            raise InputError(what, help=f"its versions are {listed(living)}")
        ending = [order.version] if order.version else living
        self._check_successor(name, ending)
        if not set(living) - set(ending):
            if len(self._edges.models) == 1:
                what = f"{name!r} is the only application of this server"
                raise InputError(what, help="stop the server instead (SIGTERM); it finishes open requests too")
            self._edges.withdraw(name)
        self._driver.on_event(Removed(name, order.version))
        await asyncio.sleep(0)  # the driver passes events on at the end of this turn
        left = [each for each in self._core.versions(name) if each.state not in ENDING_STATES]
        if not order.version or not left:
            tell(f"{name!r} gets no new requests; open ones are finished")
        else:
            heir = max(left, key=lambda each: each.share)
            gets = "gets all" if heir.state is VersionState.SERVING else "gets all when it is ready"
            tell(f"version {order.version} of {name!r} gets no new requests; version {heir.name} {gets}")
        ended = [await self._until(name, each, (VersionState.RETIRED,), ENDING_STATES, tell) for each in ending]
        return Done(tuple(status for done in ended for status in done.versions))

    def _check_successor(self, name: str, ending: Sequence[str]) -> None:
        """InputError if all that serves is to end while another version is still starting: its requests would have
        nowhere to go until that one is ready."""
        left = [each for each in self._core.versions(name) if each.name not in ending]
        starting = [each for each in left if each.state is VersionState.STARTING]
        if not starting or any(each.state in SERVING_STATES for each in left):
            return
        successor = starting[0]
        is_canary = successor.canary is not None
        fix = f"promote it (`sloop deploy --promote {name}`)" if is_canary else "wait until it is ready"
        what = f"version {listed(ending)} of {name!r} is all that serves, and version {successor.name} still starts"
        raise InputError(what, help=f"{fix}: then it takes its place; or remove all versions: --remove {name}")

    # Rollouts

    def _on_rollout(self, rollout: Rollout) -> None:
        """The core has moved a version to another state; the driver has followed."""
        name, version = rollout.application, rollout.version
        _log.info("version %s of %r: %s (%s)", version, name, rollout.state.value, rollout.why)
        self._last[name, version] = rollout
        if rollout.state is VersionState.RETIRED:
            self._ended[name] = rollout
            self._gone.append((name, version))
            if len(self._gone) > ENDED_KEPT:
                del self._last[self._gone.popleft()]
        self._changed.set()
        if rollout.state is VersionState.RETIRED:
            key = version_key(name, version)
            del self._applications[key]
            self._files.drop(key)
        self._offer(name)

    def _offer(self, name: str) -> None:
        """Let the edges know what has changed of an application."""
        served = self._driver.served(name)
        if served is not None and name in self._edges.models:
            others = [other for other in self._driver.versions(name) if other is not served]
            serving = self._insight.versions(name)
            self._edges.offer(offer_of(self._applications[served.key], [served, *others], serving))

    async def _until(
        self, name: str, version: str, ends: Sequence[VersionState], good: Sequence[VersionState], tell: Tell
    ) -> Done:
        """Wait until a version is in one of the states `ends`, and ready if it gets requests then. It is well if the
        state is one of `good`."""
        last_text = ""
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + WAIT_S_MAX
        await asyncio.sleep(0)  # the driver passes events on at the end of this turn
        while True:
            last = self._last.get((name, version))
            readiness = self._insight.state_of(name, version)
            unready = readiness.why if readiness is not None else ""
            now = f"version {version} of {name!r} {self._progress(name, version, unready)}"
            if now != last_text:
                tell(now)
                last_text = now
            if last is not None and last.state in ends and not unready:
                return Done((_status(last),), is_good=last.state in good)
            if loop.time() >= give_up_s:
                raise MachineError(f"{now}, after {WAIT_S_MAX:g} s", help="it goes on; `sloop deploy --list` shows it")
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), STATUS_S)
            if self._driver.is_stopped:
                raise MachineError("the server has stopped", help="see its messages")

    def _progress(self, name: str, version: str, unready: str) -> str:
        """What a version does now; `unready` is why its model does not answer requests, if it does not."""
        found = next((each for each in self._core.versions(name) if each.name == version), None)
        if found is None or found.state in ENDING_STATES:
            last = self._last.get((name, version))
            why = f": {last.why}" if last is not None else ""
            return f"{'has ended' if found is None else 'ends'}{why}"
        plan = found.control.plan
        planned = sum(group.count for target in plan.stages for group in target.groups) if plan is not None else 0
        own = [each for each in found.application.replicas.values() if each.stage.application is found.application]
        ready = f"{sum(each.life is Life.READY for each in own)} of {planned} replicas ready"
        if found.state is VersionState.STARTING or unready:
            return f"starts: {ready if planned else unready or 'its plan is being made'}"
        if found.state is VersionState.SERVING:
            return "serves all requests"
        is_canary = f"is a canary with {100 * found.share:.3g} % of the requests"
        return is_canary if found.canary is not None else f"{is_canary}; promoted, {ready}"

    def _known(self, name: str) -> str:
        if name not in self._edges.models:
            served = ", ".join(self._edges.models)
            raise InputError(f"this server has no application {name!r}", help=f"its applications are {served}")
        return name

    def statuses(self) -> tuple[VersionStatus, ...]:
        """All versions that have not ended."""
        found: list[VersionStatus] = []
        for name in self._used:
            versions = self._core.versions(name)
            limits = next((each.canary for each in versions if each.canary and each.state is VersionState.CANARY), None)
            for each in versions:
                last = self._last.get((name, each.name))
                why = last.why if last is not None else "since the server began"
                readiness = self._insight.readiness(name, each.name)
                if readiness is not None and readiness.why:
                    why = f"{why}; {readiness.why}"
                compared = None
                if limits is not None and each.state in SERVING_STATES:
                    ended, share = each.attainment.ended, each.attainment.share
                    compared = Comparison(ended, share if ended else None, max(0, limits.requests_min - ended))
                model = readiness.state.value if readiness is not None else ""
                found.append(VersionStatus(name, each.name, each.state.value, each.share, why, model, compared))
        return tuple(found)


class ModelRepository:
    """Loads and ends models as clients order, as Triton's model repository extension has it.

    The model NAME is the application in the file `NAME.yaml` of `folder`; without a folder, models can only be listed.
    """

    def __init__(self, deployer: Deployer, folder: Path | None) -> None:
        self._deployer, self._folder = deployer, folder
        self._open: set[asyncio.Task[None]] = set()

    def index(self) -> bytes:
        """See `sloop.serve.protocols.AskIndex`."""
        serving = self._deployer.statuses()
        found = [
            {"name": each.application, "version": each.version, "state": TRITON_STATES[each.model], "reason": each.why}
            for each in serving
        ]
        names = {each.application for each in serving} | self._deployer.refused.keys()
        found += [
            {"name": name, "version": "", "state": "UNAVAILABLE", "reason": each.why}
            for name, each in self._deployer.refused.items()
        ]
        found += [
            {"name": name, "version": "", "state": "UNAVAILABLE", "reason": "not loaded"}
            for name in self._files()
            if name not in names
        ]
        return msgspec.json.encode(found)

    def change(self, name: str, is_loaded: bool, then: Callable[[bytes], None]) -> None:  # as in ChangeModel
        """See `sloop.serve.protocols.ChangeModel`."""
        try:
            if self._folder is None:
                fix = "start it with --repository DIR and a key with the role admin, or use `sloop deploy`"
                raise Refusal(403, "clients may not load or end models of this server", fix)
            if len(self._open) >= ORDERS_MAX:
                raise Refusal(503, f"{len(self._open)} orders are carried out", "try again later", retry_after_s=10)
            if is_loaded and name not in self._files():
                what = f"the repository has no model {quoted(name)}"
                raise Refusal(404, what, f"it has {listed(self._files()[:NAMES_MAX]) or 'no files NAME.yaml'}")
        except Refusal as refusal:
            then(_answer_of(refusal))
            return
        file = str((self._folder / f"{name}{APPLICATION_FILE}").absolute())
        order = Deploy(file, application=name) if is_loaded else Remove(name)
        work = asyncio.get_running_loop().create_task(self._carry_out(order, then))
        self._open.add(work)
        work.add_done_callback(self._open.discard)

    async def close(self) -> None:
        """Drop all orders."""
        for work in self._open:
            work.cancel()
        if self._open:
            await asyncio.wait(self._open)

    def _files(self) -> list[str]:
        """The names of the models that could be loaded."""
        if self._folder is None:
            return []
        return sorted(path.name.removesuffix(APPLICATION_FILE) for path in self._folder.glob(f"*{APPLICATION_FILE}"))

    async def _carry_out(self, order: Deploy | Remove, then: Callable[[bytes], None]) -> None:
        answer = b""
        try:
            done = await self._deployer.handle(order, lambda _: None)
            if not done.is_good:
                why = "; ".join(each.why for each in done.versions)
                answer = _answer_of(Refusal(500, f"the model was given up: {why}", "see /v2/sloop/decisions"))
        except asyncio.CancelledError:
            then(_answer_of(Refusal(503, f"dropped: {LEAVING}", "send it to another server, or when this one is back")))
            raise
        except SloopError as error:
            is_wrong = isinstance(error, InputError)
            answer = _answer_of(Refusal(400 if is_wrong else 500, str(error.args[0]), error.help))
        except Exception as error:
            _log.exception("an order of a client failed")
            answer = _answer_of(Refusal(500, f"the server failed on this order: {error!r}", "see its messages"))
        then(answer)


def _answer_of(refusal: Refusal) -> bytes:
    return msgspec.json.encode(refusal.fields)


def _status(rollout: Rollout) -> VersionStatus:
    return VersionStatus(rollout.application, rollout.version, rollout.state.value, rollout.share, rollout.why)


def _next_number(used: set[str]) -> str:
    return str(max([int(version) for version in used if version.isdecimal()], default=0) + 1)


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


if __name__ == "__main__":
    main(sys.argv[1:])
