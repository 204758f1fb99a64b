"""Models that are cut into blocks, for shadows and for parts of pipelines, as their profiles were measured."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from sloop.errors import InputError
from sloop.profile.examine import ExaminedModel
from sloop.profile.layers import kept_pieces
from sloop.profile.onnx_cut import ModelPiece, data_file
from sloop.profile.profile import Profile
from sloop.serve.messages import CutBlock
from sloop.serve.protocols import CutModel
from sloop.systems.setup import ApplicationSetup
from sloop.text import listed

WITHOUT_SHADOWS: Final = "write `shadows: false`, or choose a system without shadows"
WITHOUT_PARTS: Final = "write `partition: false` in its `provision`: each replica starts with its whole model"


def needs_blocks(setup: ApplicationSetup) -> bool:
    """Whether the application's system attaches shadows to replicas."""
    return setup.system.policies.scale.attaches_shadows


def starts_parts(setup: ApplicationSetup) -> bool:
    """Whether replicas of the application may start as parts of one model."""
    return setup.system.policies.provision.partition


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
