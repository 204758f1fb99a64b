"""The models of Flashpoint's evaluation, and their profiles.

Source: San Juan, Flashpoint (thesis, Waterloo 2023), Table 3.1, with what our specification derives from its text,
sections 3.1 and 3.2. Most durations are not printed: each figure says where it comes from.
"""

from itertools import accumulate, pairwise
from typing import Final, NamedTuple

from sloop.api import LINK_MBPS
from sloop.api.profiles import LatencyTable, LayerBlock, LayerProfile, Origin, Profile, Quadratic, Startup


class PublishedFigure(NamedTuple):
    """A figure with its origin."""

    value: float
    origin: Origin
    source: str


class LayerGroup(NamedTuple):
    """Equal consecutive layers of a model, with their weights in fp32."""

    name: str
    layers: int
    size_bytes: int
    """Of each layer."""


class FlashpointModel(NamedTuple):
    """A model of Flashpoint's evaluation and the parts of its cold start on an accelerator."""

    name: str
    parameters: int
    size_bytes: PublishedFigure
    exec_ms: PublishedFigure
    """One inference."""
    load_s: PublishedFigure
    """From the file in the host's memory to a process that has it loaded."""
    send_s: PublishedFigure
    """From that process to the accelerator."""
    groups: tuple[LayerGroup, ...]
    """Its layers in order, from its public architecture. Their sizes may differ from `size_bytes` by 0.02 %."""
    crossing_bytes: PublishedFigure
    """What crosses each boundary between two layers."""

    @property
    def layers(self) -> tuple[tuple[str, int], ...]:
        """Name and bytes of each layer."""
        return tuple(
            (group.name if group.layers == 1 else f"{group.name}.{place}", group.size_bytes)
            for group in self.groups
            for place in range(group.layers)
        )


FLASHPOINT: Final = "San Juan, Flashpoint, thesis, Waterloo 2023"
_CALIBRATED: Final = "not printed; calibrated so that the six models have the printed means in units of an inference"
_FROM_MEANS: Final = "section 3.2.2: mean latency 20.74 s, which is 147.48 inferences; 11.52 s and 82 agree"
_T5_STAGES: Final = "section 3.2.2: stages of T5-3B on an A10"
_ALL_CUT_T5: Final = (0.4394, "section 4.1.3: all boundaries cut, inference is 43.94 % slower")
_ALL_CUT: Final = (0.4472, "not printed; calibrated so that all six are 44.59 % slower on average if cut everywhere")
_BLOCK: Final = "block"


def _flashpoint_model(
    name: str,
    parameters: int,
    size_mb: int,
    exec_ms: PublishedFigure,
    stages_s: tuple[PublishedFigure, PublishedFigure],
    groups: tuple[LayerGroup, ...],
    slower: tuple[float, str] = _ALL_CUT,
) -> FlashpointModel:
    boundaries = sum(group.layers for group in groups) - 1
    share, source = slower
    crossing_bytes = share * exec_ms.value / 1e3 / boundaries * LINK_MBPS * 1e6 / 8
    return FlashpointModel(
        name,
        parameters,
        PublishedFigure(size_mb * 1e6, "published", f"{FLASHPOINT}, Table 3.1"),
        exec_ms,
        *stages_s,
        groups,
        PublishedFigure(crossing_bytes, "fitted" if slower is _ALL_CUT_T5 else "assumed", f"{FLASHPOINT}, {source}"),
    )


def _calibrated(value: float) -> PublishedFigure:
    return PublishedFigure(value, "assumed", f"{FLASHPOINT}: {_CALIBRATED}")


def _stages(load_s: float, send_s: float) -> tuple[PublishedFigure, PublishedFigure]:
    return _calibrated(load_s), _calibrated(send_s)


def _blocks(size_mb: int, *groups: tuple[str, int, int]) -> tuple[LayerGroup, ...]:
    """Embeddings, which have what the blocks leave of the file, and groups of blocks with their parameters in fp32."""
    made = [LayerGroup(name, layers, 4 * parameters) for name, layers, parameters in groups]
    rest_bytes = size_mb * 1_000_000 - sum(group.layers * group.size_bytes for group in made)
    return (LayerGroup("embedding", 1, rest_bytes), *made)


FLASHPOINT_MODELS: Final = {
    model.name: model
    for model in (
        _flashpoint_model(
            "CodeBERT", 125_000_000, 499, _calibrated(6.0), _stages(0.851, 0.069),
            _blocks(499, (_BLOCK, 12, 7_087_872)),
        ),
        # All its blocks share their weights: every piece with a block needs them. They stand in the first block.
        _flashpoint_model(
            "ALBERT-xxlarge", 223_000_000, 890, _calibrated(40.0), _stages(1.327, 0.110),
            _blocks(890, ("shared", 1, 201_379_840), (_BLOCK, 11, 0)),
        ),
        _flashpoint_model(
            "BART-large", 406_000_000, 1626, _calibrated(7.0), _stages(2.224, 0.186),
            _blocks(1626, ("encoder", 12, 12_596_224), ("decoder", 12, 16_796_672)),
        ),
        _flashpoint_model(
            "DialoGPT-large", 774_000_000, 3135, _calibrated(12.0), _stages(4.062, 0.344),
            _blocks(3135, (_BLOCK, 36, 19_677_440)),
        ),
        _flashpoint_model(
            "GPT-2-XL", 1_558_000_000, 6282, _calibrated(22.4), _stages(7.895, 0.672),
            _blocks(6282, (_BLOCK, 48, 30_740_800)),
        ),
        _flashpoint_model(
            "T5-3B", 2_851_598_336, 11_408,
            PublishedFigure(140.6, "fitted", f"{FLASHPOINT}, {_FROM_MEANS}"),
            (
                PublishedFigure(14.138, "published", f"{FLASHPOINT}, {_T5_STAGES}"),
                PublishedFigure(1.206, "published", f"{FLASHPOINT}, {_T5_STAGES}"),
            ),
            (
                LayerGroup("embedding", 1, 131_600_000),
                LayerGroup("encoder.dropout", 1, 0),
                LayerGroup("encoder", 24, 201_330_000),
                LayerGroup("encoder.norm", 1, 4096),
                LayerGroup("decoder.dropout", 1, 0),
                LayerGroup("decoder", 24, 268_450_000),
                LayerGroup("decoder.norm", 1, 4096),
                LayerGroup("decoder.dropout.last", 1, 0),
                LayerGroup("head", 1, 0),
            ),
            _ALL_CUT_T5,
        ),
    )
}  # fmt: skip
"""The six models, smallest first. T5's head has the weights of the embedding, so that none are counted for it."""


def _whole_bytes(model: FlashpointModel) -> list[int]:
    """The sizes of the layers, scaled so that they sum to the size of the file."""
    sizes = [size_bytes for _, size_bytes in model.layers]
    ends = [round(model.size_bytes.value * end / sum(sizes)) for end in accumulate(sizes, initial=0)]
    return [end - begin for begin, end in pairwise(ends)]


def _layers_of(model: FlashpointModel) -> LayerProfile:
    """Loading takes as long as its bytes, and every layer the same part of an inference: neither is printed."""
    table = LatencyTable({1: {1.0: model.exec_ms.value / len(model.layers)}})
    load_ms = 1e3 * (model.load_s.value + model.send_s.value)
    crossing_bytes = round(model.crossing_bytes.value)
    return LayerProfile(
        blocks=tuple(
            LayerBlock(
                end=name,
                operators="a layer of the architecture",
                layers=1,
                param_bytes=size_bytes,
                output_bytes=crossing_bytes,
                crossing_bytes=crossing_bytes,
                load_ms=load_ms * size_bytes / model.size_bytes.value,
                latency_ms=table,
            )
            for (name, _), size_bytes in zip(model.layers, _whole_bytes(model), strict=True)
        ),
        load_ms=load_ms,
        latency_ms=LatencyTable({1: {1.0: model.exec_ms.value}}),
        input_bytes=crossing_bytes,
        move_ms_per_mb=8e3 / LINK_MBPS,
        difference=0.0,
        origin="assumed",
        source=f"public architecture of {model.name}, all layers equally slow; {model.crossing_bytes.source}",
        hardware=_LAMBDA,
        date="2023",
    )


_LAMBDA: Final = "Lambda Labs: 30 vCPUs of an Intel Xeon Platinum 8358, 200 GiB, NVIDIA A10 (24 GB)"


def _profile_of(model: FlashpointModel) -> Profile:
    parts = (model.exec_ms, model.load_s, model.send_s)
    return Profile(
        latency_ms=Quadratic(0.0, model.exec_ms.value, 0.0),
        max_batch=1,
        max_cores=1,
        load_s=model.load_s.value + model.send_s.value,
        startup=Startup(0.0, model.load_s.value, 0.0, send_s=model.send_s.value),
        weights_bytes=round(model.size_bytes.value),
        hardware=_LAMBDA,
        accelerator="A10",
        device_memory_bytes=round(model.size_bytes.value),
        origin="assumed" if any(part.origin == "assumed" for part in parts) else "fitted",
        source="; ".join(dict.fromkeys(part.source for part in (model.size_bytes, *parts))),
        software="PyTorch, traced, fp32",
        date="2023",
        layers=_layers_of(model),
    )


PROFILES: Final = {model.name: _profile_of(model) for model in FLASHPOINT_MODELS.values()}
CODEBERT, ALBERT, BART, DIALOGPT, GPT2, T5 = PROFILES.values()
