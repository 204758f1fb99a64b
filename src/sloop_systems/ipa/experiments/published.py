"""IPA's published data: its five pipelines, and readings of its figures.

Accuracies, cores, deadlines and weights are printed (dissertation, chapter P3, tables 6 to 15); accuracies are taken
from the artefact, which produced the published figures. Speeds are mostly not printed: detection and classification
follow the specification's reference profile R1 (7.3), other models the artefact's largest throughput of one replica at
batch 1 (3.6). Values missing from the artefact are assumed: 16 requests/s for question answering and sentiment, of
which plans use 8, so that RIM's published replicas suffice; and the throughput of summarisers on 1, 2, 4, 8 and 16
cores, 0.57, 1, 1.65, 2.3 and 2.55 times the throughput on 2 cores, on which they were measured.

Cores and accuracy (100 · PAS) over time are read off figures P3.8 to P3.16, to about one unit; violations are printed
in notebooks of the public artefact, as the specification (5.3) lists them.

Source: Razavi, dissertation (TU Darmstadt 2024), chapter P3, and IPA's public artefact.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from msgspec import Struct

from sloop.api.profiles import Origin, Profile, Quadratic
from sloop_systems.ipa.solver import Measure

Policy = Literal["ipa", "fa2-low", "fa2-high", "rim"]
POLICIES: tuple[Policy, ...] = ("ipa", "fa2-low", "fa2-high", "rim")

HARDWARE: Final = "Intel Xeon Gold 6240R"
BATCHES_PROFILED: Final = 64


@dataclass(frozen=True, slots=True)
class VariantModel:
    """A variant: accuracy as a fraction, cores of a replica, and milliseconds per request and per batch on these
    cores."""

    name: str
    accuracy: float
    cores: float
    each_ms: float
    fixed_ms: float = 0.0
    origin: Origin = "published"

    @property
    def profile(self) -> Profile:
        """The profile; constant in the cores, because replicas always have `cores`."""
        return Profile(
            latency_ms=Quadratic(0.0, self.each_ms, self.fixed_ms),
            max_batch=BATCHES_PROFILED,
            max_cores=self.cores,
            hardware=HARDWARE,
            origin=self.origin,
            source="IPA (Razavi, dissertation, chapter P3; public artefact), see sloop_systems/ipa",
        )


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """A stage and its variants, lightest first; `high` is FA2-high's variant, `rim` RIM's number of replicas."""

    name: str
    models: tuple[VariantModel, ...]
    high: str
    rim: int


@dataclass(frozen=True, slots=True)
class IpaPipeline:
    """A chain of stages with its published settings.

    `alpha_bursty` is the artefact's weight of accuracy under bursty and fluctuating load; `alpha_rim` and
    `beta_rim` are RIM's weights; `margin` is added to forecasts, `margin_high` under the steady high load; `load_max`
    is the share of the profiled throughput that plans use.
    """

    name: str
    stages: tuple[PipelineStage, ...]
    slo_s: float
    drop_s: float
    alpha: float
    alpha_bursty: float
    beta: float
    measure: Measure
    batch_max: int = 1
    margin: float = 0.0
    margin_high: float = 0.0
    load_max: float = 0.5
    alpha_rim: float = 0.0
    beta_rim: float = 0.0


def by_rate(name: str, accuracy: float, cores: float, rps: float, origin: Origin = "published") -> VariantModel:
    """A variant for which only the throughput of one replica at batch 1 is known."""
    return VariantModel(name, accuracy, cores, 1000.0 / rps, origin=origin)


def _summarisers(cores_12_6: int, rps_12_6: float) -> tuple[VariantModel, ...]:
    return (
        by_rate("distilbart-1-1", 0.3226, 1, 5.6, "assumed"),
        by_rate("distilbart-12-1", 0.3337, 2, 5.03),
        by_rate("distilbart-6-6", 0.3573, 4, 6.86, "assumed"),
        by_rate("distilbart-12-3", 0.3639, 8, 9.71, "assumed"),
        by_rate("distilbart-9-6", 0.3661, 8, 8.53, "assumed"),
        by_rate("distilbart-12-6", 0.3699, cores_12_6, rps_12_6, "assumed"),
    )


DETECTION: Final = (
    VariantModel("yolov5n", 0.457, 1, 57.3, 22.7),
    VariantModel("yolov5s", 0.568, 1, 160.0, 40.0, "assumed"),
    VariantModel("yolov5m", 0.641, 2, 186.7, 160.3),
    VariantModel("yolov5l", 0.673, 4, 190.0, 150.0, "assumed"),
    VariantModel("yolov5x", 0.689, 8, 190.0, 130.0, "assumed"),
)
CLASSIFICATION: Final = (
    VariantModel("resnet18", 0.6975, 1, 44.3, 28.7),
    VariantModel("resnet34", 0.7331, 1, 78.0, 32.0),
    VariantModel("resnet50", 0.7613, 1, 99.6, 36.4),
    VariantModel("resnet101", 0.7737, 1, 190.0, 50.0),
    VariantModel("resnet152", 0.7831, 2, 150.0, 40.0),
)
SPEECH: Final = (
    by_rate("s2t-small", 0.5872, 1, 2.99),
    by_rate("s2t-medium", 0.6488, 2, 2.27),
    by_rate("s2t-large", 0.6674, 4, 1.32),
)
QUESTIONS: Final = (
    by_rate("xlm-roberta-base", 0.7714, 1, 16.0, "assumed"),
    by_rate("roberta-base", 0.8291, 1, 16.0, "assumed"),
)
SENTIMENT: Final = (
    by_rate("distilbert", 0.796, 1, 16.0, "assumed"),
    by_rate("bert", 0.799, 1, 16.0, "assumed"),
    by_rate("roberta", 0.830, 1, 16.0, "assumed"),
    by_rate("distilbert-sst2", 0.911, 1, 16.0, "assumed"),
)
LANGUAGE: Final = (by_rate("roberta-base", 0.9959, 1, 11.5),)
TRANSLATION: Final = (by_rate("opus-mt", 0.331, 4, 3.10), by_rate("opus-mt-tc-big", 0.344, 16, 3.29))

PIPELINES: Final[Mapping[str, IpaPipeline]] = {
    pipeline.name: pipeline
    for pipeline in (
        IpaPipeline(
            "video",
            (
                PipelineStage("detect", DETECTION, "yolov5s", 3),
                PipelineStage("classify", CLASSIFICATION, "resnet101", 3),
            ),
            slo_s=6.89,
            drop_s=10,
            alpha=2,
            alpha_bursty=2,
            beta=1,
            measure="pas",
            batch_max=8,
            load_max=1.0,
        ),
        IpaPipeline(
            "audio-qa",
            (
                PipelineStage("speech", SPEECH, "s2t-medium", 27),
                PipelineStage("questions", QUESTIONS, "roberta-base", 6),
            ),
            slo_s=9.23,
            drop_s=20,
            alpha=10,
            alpha_bursty=20,
            beta=0.5,
            measure="norm_prod",
            margin=0.2,
            alpha_rim=10,
            beta_rim=0.1,
        ),
        IpaPipeline(
            "audio-sent",
            (
                PipelineStage("speech", SPEECH, "s2t-medium", 27),
                PipelineStage("sentiment", SENTIMENT, "distilbert-sst2", 5),
            ),
            slo_s=9.42,
            drop_s=20,
            alpha=30,
            alpha_bursty=30,
            beta=0.5,
            measure="norm_prod",
            margin=0.2,
            beta_rim=0.4,
        ),
        IpaPipeline(
            "sum-qa",
            (
                PipelineStage("summarise", _summarisers(16, 8.36), "distilbart-12-6", 12),
                PipelineStage("questions", QUESTIONS, "roberta-base", 8),
            ),
            slo_s=3.84,
            drop_s=5,
            alpha=10,
            alpha_bursty=10,
            beta=0.5,
            measure="norm_prod",
            alpha_rim=11,
            beta_rim=0.3,
        ),
        IpaPipeline(
            "nlp",
            (
                PipelineStage("language", LANGUAGE, "roberta-base", 6),
                PipelineStage("translate", TRANSLATION, "opus-mt-tc-big", 22),
                PipelineStage("summarise", _summarisers(8, 7.54), "distilbart-12-6", 12),
            ),
            slo_s=17.61,
            drop_s=20,
            alpha=40,
            alpha_bursty=100,
            beta=0.5,
            measure="norm_prod",
            margin_high=0.2,
        ),
    )
}

RIM_STEADY_LOW: Final[Mapping[str, tuple[int, ...]]] = {"audio-qa": (20, 5), "audio-sent": (20, 5)}
"""RIM's replicas under the steady low load, if they differ from its other runs."""

WEIGHTS: Final[Mapping[str, tuple[tuple[float, float], ...]]] = {
    "video": ((10, 0.125), (4, 1), (0.125, 1)),
    "audio-qa": ((10, 0.125), (10, 0.5), (0.125, 10)),
    "audio-sent": ((10, 0.125), (10, 0.5), (0.125, 10)),
    "sum-qa": ((10, 0.125), (10, 0.5), (0.125, 10)),
    "nlp": ((100, 0), (20, 0.5), (0.125, 10)),
}
"""α and β if accuracy, balance or resources are preferred."""


# Readings of the figures.


class Reading(Struct, frozen=True):
    """Cores and 100 · PAS of one policy, read off a figure."""

    cores: float
    pas: float


def _readings(*pairs: tuple[float, float]) -> dict[Policy, Reading]:
    """Readings of the four policies, in the order of `POLICIES`."""
    return {policy: Reading(*pair) for policy, pair in zip(POLICIES, pairs, strict=True)}


STEADY_LOW: Final[Mapping[str, Mapping[Policy, Reading]]] = {
    "video": _readings((4, 34.8), (4, 31.9), (8, 43.9), (12, 43.9)),
    "audio-qa": _readings((9, 48.7), (8, 45.3), (17, 53.8), (25, 48.7)),
    "audio-sent": _readings((16, 59.1), (8, 46.75), (19, 59.1), (45, 59.1)),
    "sum-qa": _readings((18, 30.35), (5, 24.9), (34, 30.7), (32, 30.2)),
    "nlp": _readings((98, 12.68), (25, 10.63), (113, 12.68), (105, 10.63)),
}
STEADY_HIGH: Final[Mapping[str, Mapping[Policy, Reading]]] = {
    "video": _readings((10, 31.9), (10, 31.9), (21, 43.9), (12, 33.5)),
    "audio-qa": _readings((33, 48.7), (34, 45.3), (95, 53.8), (33, 48.7)),
    "audio-sent": _readings((31, 53.5), (30, 46.75), (95, 59.1), (32, 53.5)),
    "nlp": _readings((125, 10.63), (105, 10.63), (505, 12.68), (105, 10.63)),
}
BURSTY_CALM: Final[Mapping[str, Mapping[Policy, Reading]]] = {
    "video": _readings((4, 34.8), (4, 31.9), (8, 43.9), (12, 43.9)),
    "audio-qa": _readings((17, 53.8), (9, 45.3), (17, 53.8), (60, 53.8)),
    "audio-sent": _readings((17, 59.1), (8, 46.75), (16, 59.1), (59, 59.1)),
    "sum-qa": _readings((18, 30.35), (6, 24.9), (34, 30.7), (32, 30.2)),
    "nlp": _readings((130, 12.68), (25, 10.63), (130, 12.68), (105, 10.63)),
}
BURSTY_BURST: Final[Mapping[str, Mapping[Policy, Reading]]] = {
    "video": _readings((10, 31.9), (10, 31.9), (21, 43.9), (12, 33.5)),
    "audio-qa": _readings((33, 48.7), (36, 45.3), (75, 53.8), (33, 48.7)),
    "audio-sent": _readings((28, 53.5), (34, 46.75), (72, 59.1), (32, 53.5)),
    "sum-qa": _readings((18, 26.75), (19, 24.9), (119, 30.7), (20, 26.75)),
    "nlp": _readings((170, 10.63), (105, 10.63), (520, 12.68), (105, 10.63)),
}
"""Under the bursty excerpt, before and during the burst."""

PREFERRED: Final[Mapping[str, tuple[tuple[float, float], ...]]] = {
    "video": ((25, 53), (4, 42), (3, 34)),
    "audio-qa": ((48, 55), (18, 52), (13, 48.7)),
    "audio-sent": ((28, 59), (17, 57), (12, 53.5)),
    "sum-qa": ((31, 30.4), (17, 29), (9, 26.7)),
    "nlp": ((185, 12.5), (107, 12), (47, 10.6)),
}
"""Cores and 100 · PAS with accuracy, balance and resources preferred."""

VIOLATIONS: Final[Mapping[str, tuple[float, float, float]]] = {
    "video": (0.48, 2.55, 0.30),
    "audio-qa": (0.91, 4.73, 0.91),
    "audio-sent": (0.35, 0.96, 0.28),
    "sum-qa": (5.6, 11.4, 2.5),
    "nlp": (1.8, 3.2, 0.6),
}
"""Percent of the bursty excerpt's requests that miss their deadline with the LSTM, reactive and oracle forecaster."""
