"""Profiles of AsyFunc's models on CPU cores, computed from the multiply-adds and bytes of their blocks.

Latencies, loads and moves are those of the parametric model and of the anchors in our specification of AsyFunc
(submission to SoCC'23), sections 2.2 and 2.3. They stand for cores that were not measured: the publication prints no
table. `blocks.json` has the blocks of the public architectures (section 3.2), for one row.
"""

from importlib.resources import files
from typing import Final, NamedTuple

import msgspec

from sloop.api.profiles import LayerBlock, LayerProfile, ParametricLatency, Profile

MIB: Final = 2**20

START_MS: Final = 0.03
"""Of each block."""
COMPUTE_PER_MS: Final = 25e6
"""Multiply-adds on one core."""
SERIAL: Final = 0.08
"""σ: what a further core costs, shared by the rows of a batch; it is what makes batches worthwhile."""
BYTES_PER_MS: Final = 6e6
"""Memory bandwidth of one core,"""
BANDWIDTH_CORES_MAX: Final = 6
"""and of how many cores at most."""
WEIGHTS_BYTES_PER_MS: Final = 20e6
LOAD_MS, LOAD_MS_PER_MIB = 6.7, 0.712
"""A line through the two published loads of YOLOv8x: 131 MiB in 100 ms, 6 MiB in 11 ms."""
MOVE_MS_PER_MB: Final = 0.5
"""Published, through a memory file system."""
CONTAINER_S: Final = 1.0
BODY_LOAD: Final = 15
"""λ: a body is there after so many batches of one on all cores; published for InceptionV3, 10 to 100 for others."""
CORES_MAX, BATCH_MAX = 16, 8


class ModelBlock(NamedTuple):
    """A row of the file."""

    name: str
    operator: str
    multiply_adds: int
    param_bytes: int
    output_bytes: int

    @property
    def latency_ms(self) -> ParametricLatency:
        """Section 2.2. A block reads and writes as much as twice its outputs, and reads its weights."""
        fixed_ms = START_MS + self.param_bytes / WEIGHTS_BYTES_PER_MS
        moved_ms = 2 * self.output_bytes / BYTES_PER_MS
        return ParametricLatency(
            fixed_ms, self.multiply_adds / COMPUTE_PER_MS, SERIAL, moved_ms, float(BANDWIDTH_CORES_MAX)
        )


class _BlockModel(msgspec.Struct, frozen=True):
    input: tuple[int, ...]
    blocks: tuple[ModelBlock, ...]


class _BlockFile(msgspec.Struct, frozen=True):
    models: dict[str, _BlockModel]


def _whole(blocks: tuple[ModelBlock, ...]) -> ParametricLatency:
    """All blocks one after the other."""
    laws = [each.latency_ms for each in blocks]
    return ParametricLatency(
        sum(each.fixed_ms for each in laws),
        sum(each.compute_ms for each in laws),
        SERIAL,
        sum(each.moved_ms for each in laws),
        float(BANDWIDTH_CORES_MAX),
    )


def _load_ms(param_bytes: int) -> float:
    return LOAD_MS + LOAD_MS_PER_MIB * param_bytes / MIB


def _profile(model: _BlockModel) -> Profile:
    whole, param_bytes = _whole(model.blocks), sum(each.param_bytes for each in model.blocks)
    input_bytes = 4
    for size in model.input:
        input_bytes *= size
    layers = LayerProfile(
        blocks=tuple(
            LayerBlock(
                end=each.name,
                operators=each.operator,
                layers=1,
                param_bytes=each.param_bytes,
                output_bytes=each.output_bytes,
                crossing_bytes=each.output_bytes,
                load_ms=_load_ms(each.param_bytes),
                latency_ms=each.latency_ms,
                multiply_adds=float(each.multiply_adds),
            )
            for each in model.blocks
        ),
        load_ms=_load_ms(param_bytes),
        latency_ms=whole,
        input_bytes=input_bytes,
        move_ms_per_mb=MOVE_MS_PER_MB,
        difference=0.0,
        origin="assumed",
        source=_SOURCE,
    )
    return Profile(
        latency_ms=whole,
        max_batch=BATCH_MAX,
        max_cores=CORES_MAX,
        load_s=CONTAINER_S + max(_load_ms(param_bytes), BODY_LOAD * whole.latency_ms(1, CORES_MAX)) / 1e3,
        weights_bytes=param_bytes,
        memory_bytes=param_bytes,
        hardware="Intel Xeon Platinum 8269CY, as assumed",
        origin="assumed",
        source=_SOURCE,
        software="PyTorch, fp32",
        date="2023",
        layers=layers,
    )


_SOURCE: Final = (
    "public architectures in the parametric latencies of our specification of AsyFunc (submission to SoCC'23), "
    "sections 2.2, 2.3 and 3.2; the publication prints no latencies"
)


def _vision_transformer() -> _BlockModel:
    """ViT-B/16 for images of 224 by 224, from its architecture: 196 patches and one token, 12 layers of width 768. A
    half of a layer is a block, because a residual connection spans it."""
    tokens, width, hidden = 197, 768, 3072
    output_bytes = 4 * tokens * width
    patches = width * width
    first = ModelBlock("patches", "Conv2d", 196 * patches, 4 * (patches + (2 + tokens) * width), output_bytes)
    attention = 4 * tokens * width**2 + 2 * tokens**2 * width, 4 * (4 * width**2 + 6 * width)
    network = 2 * tokens * width * hidden, 4 * (2 * width * hidden + hidden + 3 * width)
    halves = [
        ModelBlock(f"{layer}.{name}", name, *costs, output_bytes)
        for layer in range(12)
        for name, costs in (("attention", attention), ("mlp", network))
    ]
    last = ModelBlock("head", "Linear", 1000 * width, 4 * (1000 * width + 1000 + 2 * width), 4000)
    return _BlockModel((3, 224, 224), (first, *halves, last))


_MODELS: Final = msgspec.json.decode(
    (files("sloop_systems.asyfunc") / "blocks.json").read_bytes(), type=_BlockFile
).models

INCEPTION_V3: Final = _profile(_MODELS["inception_v3"])
EFFICIENTNET_B5: Final = _profile(_MODELS["efficientnet_b5"])
YOLO_V8X: Final = _profile(_MODELS["yolov8x"])
SSD300: Final = _profile(_MODELS["ssd300"])
RESNET101: Final = _profile(_MODELS["resnet101"])
"""By its size the "ResNet50" of the publication;"""
VGG19: Final = _profile(_MODELS["vgg19"])
"""and its "VGG16"."""
RESNET50: Final = _profile(_MODELS["resnet50"])
VGG16: Final = _profile(_MODELS["vgg16"])
VIT_B: Final = _profile(_vision_transformer())
"""Of which the publication prints one sentence."""
