"""`sloop profile --device cuda`: which GPU is measured, what batches take of it, and how long with shares of it."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from msgspec import structs
from rich.console import RenderableType

from sloop.app.hardware import ACCELERATORS
from sloop.cli.command import progress, table
from sloop.cuda import GpuPlace, MpsDaemon, gpu_called
from sloop.errors import InputError, MachineError
from sloop.profile.kernels import KernelMeasurement, Wanted, measure_kernels, with_kernels
from sloop.profile.measure import ShareSample, measure_shares
from sloop.profile.model import is_modelled
from sloop.profile.profile import DeviceSharing, Profile, load_profile
from sloop.report.tables import Table
from sloop.serve.cpu_quota import confined


def place_on(device: str | None, shares: Sequence[float]) -> GpuPlace | None:
    """The GPU that a user calls `cuda` or `cuda:1`; None if no device is named. InputError for shares that are none,
    MachineError without a GPU."""
    if device is None:
        if shares:
            raise InputError("shares are those of a GPU", where="--shares", help="add --device cuda")
        return None
    if wrong := [share for share in shares if not 0 < share < 1]:
        what = f"a share of {wrong[0]:g}; shares are above 0 and below 1, because a whole GPU is measured anyway"
        raise InputError(what, where="--shares", help="for example --shares 0.25,0.5")
    gpu = gpu_called(device)
    return GpuPlace.on(gpu, next((kind for kind in ACCELERATORS if gpu.is_of_kind(kind)), gpu.kind))


def check_replaced(model: Path, path: Path, on: GpuPlace | None) -> None:
    """InputError if the profile would replace one of other hardware."""
    there, here = load_profile(path).accelerator if path.is_file() else None, on.kind if on is not None else ""
    if there is None or there == here:
        return
    of = f"{there}, modelled" if is_modelled(there) else there or "CPU cores"
    on_this = here or ("this machine" if is_modelled(there) else "CPU cores")
    raise InputError(
        f"its profile {path.name} is of {of}; what is measured on {on_this} would replace it",
        where=str(model),
        help="keep the measured one for this kind of nodes, with --hardware local, or in another file, with --out",
    )


def share_samples(
    file: Path,
    on: GpuPlace,
    shares: Sequence[float],
    *,
    batches: Sequence[int],
    shapes: Mapping[str, tuple[int, ...]],
    seconds: float,
) -> tuple[list[ShareSample], str]:
    """The durations with each share of the GPU; and if they could not be measured, why."""
    if not shares:
        return [], ""
    try:
        with tempfile.TemporaryDirectory(prefix="sloop-mps-") as folder, MpsDaemon(on.gpu.uuid, Path(folder)) as mps:
            found = measure_shares(
                *(file, on, shares, mps), batches=batches, shapes=shapes, seconds=seconds, limit=confined
            )
            return found, ""
    except MachineError as error:
        return [], f"shares were not measured: {error.what}"


class KernelFindings(NamedTuple):
    """What was found of a model's kernels, and why some sources say nothing."""

    measured: KernelMeasurement | None
    why: Sequence[str]

    @property
    def value(self) -> dict[str, object]:
        """For `--json`."""
        return {"kernels": self.measured, "kernels_failures": self.why}

    def display(self, on: GpuPlace) -> Sequence[RenderableType]:
        """A table, and below it why a better source was not used."""
        if self.measured is None:
            said = "SM use and occupancy were not measured"
            return [f"{said}: {'; '.join(self.why)}"] if self.why else []
        counted = self.measured.source == "ncu"
        said = "not all was counted" if counted else "occupancy is an estimate from launch configurations"
        remark = [f"{said}: {'; '.join(self.why)}"] if self.why else [] if counted else [said]
        return [table(kernel_table(self.measured, on)), *remark]


def add_kernels(
    made: Profile,
    file: Path,
    on: GpuPlace | None,
    shapes: Mapping[str, tuple[int, ...]],
    wanted: Wanted,
    kept: DeviceSharing | None,
) -> tuple[Profile, KernelFindings]:
    """The profile with what its batches demand of its GPU, beside the law in `kept`, and what was found; nothing on
    cores."""
    if on is None or wanted == "none":
        return made, KernelFindings(None, ())
    known_ms = {sample.batch: sample.p50_ms for sample in made.samples}
    with progress("measuring kernels", total=len(known_ms)) as advance:
        found, why = measure_kernels(
            file, on, batches=sorted(known_ms), shapes=shapes, known_ms=known_ms, wanted=wanted, progress=advance
        )
    findings = KernelFindings(found, why)
    return made if found is None else with_kernels(structs.replace(made, sharing=kept), found), findings


def kernel_table(found: KernelMeasurement, on: GpuPlace) -> Table:
    """One row for each batch, in percent."""
    rows = tuple(
        (
            *(each.batch, each.kernels, each.pass_ms, 100 * each.busy, 100 * each.sm_use, 100 * each.occupancy),
            *(100 * each.peak_occupancy, None if each.sm_throughput is None else 100 * each.sm_throughput),
        )
        for each in found.batches
    )
    columns = ("batch", "kernels", "pass ms", "busy %", "SM use %", "occupancy %", "peak %", "SM throughput %")
    return Table(f"of the {on.kind}, by {found.software}", columns, rows)


@contextmanager
def shared_place(on: GpuPlace | None) -> Iterator[tuple[GpuPlace | None, str]]:
    """Where workers run that share a GPU without caps, and how they share it: by MPS, or by turns if that cannot be
    started. None, and nothing, without a GPU."""
    if on is None:
        yield None, ""
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sloop-mps-")))
        mps: MpsDaemon | None = None
        how = "by MPS"
        try:
            mps = stack.enter_context(MpsDaemon(on.gpu.uuid, folder))
        except MachineError as error:
            how = f"by turns, without MPS: {error.what}"
        yield GpuPlace.on(on.gpu, on.kind, 0.0, mps), how


def share_table(samples: Sequence[ShareSample], on: GpuPlace) -> Table:
    """One row for each share and batch."""
    rows = tuple(
        (each.share, each.sample.batch, each.sample.p50_ms, each.sample.p99_ms, each.sample.n) for each in samples
    )
    return Table(f"with a share of the {on.kind}, by MPS", ("share", "batch", "p50 ms", "p99 ms", "runs"), rows)
