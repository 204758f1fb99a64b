"""IPA's five pipelines: their variants, how fast they are believed to be, and what is asked of them.

Accuracies, cores, deadlines and weights are printed (dissertation, chapter P3, tables 6 to 15). Of speed little is:
detection and classification follow the specification's reference profile R1 (7.3), the others the artefact's largest
throughput of one replica one by one (3.6). What it does not tell is assumed: questions and sentiment at 16 requests/s,
8 of which are planned with, so that RIM's published replicas keep up; and how summarisers gain from cores: 1, 2, 4, 8
and 16 cores do 0.57, 1, 1.65, 2.3 and 2.55 times as much as 2, on which they were measured.
`ARTEFACT` holds the accuracies that the published figures were made with, `THESIS` those that are printed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sloop.profile.forms import Quadratic
from sloop.profile.profile import Origin, Profile
from sloop.solvers.accuracy import Measure

HARDWARE: Final = "Intel Xeon Gold 6240R"
BATCHES_PROFILED: Final = 64


@dataclass(frozen=True, slots=True)
class Model:
    """A variant: accuracy as a fraction, cores of a replica, milliseconds per request and per batch on those."""

    name: str
    accuracy: float
    cores: float
    each_ms: float
    fixed_ms: float = 0.0
    origin: Origin = "published"

    @property
    def profile(self) -> Profile:
        """Its speed, the same whatever the cores: it has no others."""
        return Profile(
            latency_ms=Quadratic(0.0, self.each_ms, self.fixed_ms),
            max_batch=BATCHES_PROFILED,
            max_cores=self.cores,
            hardware=HARDWARE,
            origin=self.origin,
            source="IPA (Razavi, dissertation, chapter P3; public artefact), see reproduce/ipa/pipelines.py",
        )


@dataclass(frozen=True, slots=True)
class Step:
    """A stage and its variants, lightest first; `high` is FA2-high's, `rim` are RIM's replicas."""

    name: str
    models: tuple[Model, ...]
    high: str
    rim: int


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A chain of stages with its published settings.

    `alpha_bursty` is the weight of accuracy that the artefact has under bursty and fluctuating load, `beta_rim` and
    `alpha_rim` RIM's; `margin` is added to forecasts, `margin_high` under the steady high
    load; `load_max` is the part of the profiled throughput planned with.
    """

    name: str
    steps: tuple[Step, ...]
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

    def model(self, step: int, name: str) -> Model:
        """The variant called `name` of stage number `step`."""
        return next(model for model in self.steps[step].models if model.name == name)


def by_rate(name: str, accuracy: float, cores: float, rps: float, origin: Origin = "published") -> Model:
    """A variant of which is known what one replica does at most."""
    return Model(name, accuracy, cores, 1000.0 / rps, origin=origin)


def _summarisers(cores_12_6: int, rps_12_6: float) -> tuple[Model, ...]:
    return (
        by_rate("distilbart-1-1", 0.3226, 1, 5.6, "assumed"),
        by_rate("distilbart-12-1", 0.3337, 2, 5.03),
        by_rate("distilbart-6-6", 0.3573, 4, 6.86, "assumed"),
        by_rate("distilbart-12-3", 0.3639, 8, 9.71, "assumed"),
        by_rate("distilbart-9-6", 0.3661, 8, 8.53, "assumed"),
        by_rate("distilbart-12-6", 0.3699, cores_12_6, rps_12_6, "assumed"),
    )


DETECTION: Final = (
    Model("yolov5n", 0.457, 1, 57.3, 22.7),
    Model("yolov5s", 0.568, 1, 160.0, 40.0, "assumed"),
    Model("yolov5m", 0.641, 2, 186.7, 160.3),
    Model("yolov5l", 0.673, 4, 190.0, 150.0, "assumed"),
    Model("yolov5x", 0.689, 8, 190.0, 130.0, "assumed"),
)
CLASSIFICATION: Final = (
    Model("resnet18", 0.6975, 1, 44.3, 28.7),
    Model("resnet34", 0.7331, 1, 78.0, 32.0),
    Model("resnet50", 0.7613, 1, 99.6, 36.4),
    Model("resnet101", 0.7737, 1, 190.0, 50.0),
    Model("resnet152", 0.7831, 2, 150.0, 40.0),
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

ARTEFACT: Final[Mapping[str, Pipeline]] = {
    pipeline.name: pipeline
    for pipeline in (
        Pipeline(
            "video",
            (Step("detect", DETECTION, "yolov5s", 3), Step("classify", CLASSIFICATION, "resnet101", 3)),
            slo_s=6.89,
            drop_s=10,
            alpha=2,
            alpha_bursty=2,
            beta=1,
            measure="pas",
            batch_max=8,
            load_max=1.0,
        ),
        Pipeline(
            "audio-qa",
            (Step("speech", SPEECH, "s2t-medium", 27), Step("questions", QUESTIONS, "roberta-base", 6)),
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
        Pipeline(
            "audio-sent",
            (Step("speech", SPEECH, "s2t-medium", 27), Step("sentiment", SENTIMENT, "distilbert-sst2", 5)),
            slo_s=9.42,
            drop_s=20,
            alpha=30,
            alpha_bursty=30,
            beta=0.5,
            measure="norm_prod",
            margin=0.2,
            beta_rim=0.4,
        ),
        Pipeline(
            "sum-qa",
            (
                Step("summarise", _summarisers(16, 8.36), "distilbart-12-6", 12),
                Step("questions", QUESTIONS, "roberta-base", 8),
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
        Pipeline(
            "nlp",
            (
                Step("language", LANGUAGE, "roberta-base", 6),
                Step("translate", TRANSLATION, "opus-mt-tc-big", 22),
                Step("summarise", _summarisers(8, 7.54), "distilbart-12-6", 12),
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
"""RIM's replicas under the steady low load, where they differ."""

PREFERENCES: Final[Mapping[str, tuple[tuple[float, float], ...]]] = {
    "video": ((10, 0.125), (4, 1), (0.125, 1)),
    "audio-qa": ((10, 0.125), (10, 0.5), (0.125, 10)),
    "audio-sent": ((10, 0.125), (10, 0.5), (0.125, 10)),
    "sum-qa": ((10, 0.125), (10, 0.5), (0.125, 10)),
    "nlp": ((100, 0), (20, 0.5), (0.125, 10)),
}
"""α and β for accuracy, balance and resources."""

_AUDIO = (58.72, 64.88, 66.15, 66.74, 72.35)
_QA = (77.14, 83.79)
_SUMMARIES = (32.26, 33.37, 35.73, 36.39, 36.61, 36.99)
THESIS: Final[Mapping[str, tuple[tuple[tuple[float, ...], ...], tuple[float, float]]]] = {
    "video": (((45.7, 56.8, 64.1, 67.3, 68.9), (69.75, 73.31, 76.13, 77.37, 78.31)), (31.88, 53.96)),
    "audio-qa": ((_AUDIO, _QA), (45.30, 60.62)),
    "audio-sent": ((_AUDIO, (79.6, 79.9, 83.0)), (46.74, 60.05)),
    "sum-qa": ((_SUMMARIES, _QA), (24.89, 30.99)),
    "nlp": (((79.62,), (33.1, 34.4), _SUMMARIES), (8.50, 10.13)),
}
"""Accuracies in percent as printed, and the range of 100 · PAS they span."""
