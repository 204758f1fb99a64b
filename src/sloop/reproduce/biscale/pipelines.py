"""The three pipelines of Biscale's evaluation: published fits of their models, SLOs, and what differs between them.

Source: dissertation chapter P4; coefficients, batch limits, stability counts and divisors as in the public artefact.
"""

from dataclasses import dataclass
from typing import Final

from sloop.profile.forms import Amdahl
from sloop.profile.profile import Profile

CORES_MAX: Final = 8


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A chain of models and how it is run. `cold_s` is how long a new replica takes to start."""

    name: str
    models: tuple[tuple[str, Amdahl], ...]
    slo_ms: int
    batch_max: int
    settle: int
    """K: decisions that must agree before replicas are made small again."""
    divisor: float
    """Of the trace, which is in tweets per second."""
    cold_s: float

    @property
    def profiles(self) -> dict[str, Profile]:
        """By stage."""
        return {
            name: Profile(
                latency_ms=form,
                max_batch=self.batch_max,
                max_cores=CORES_MAX,
                load_s=self.cold_s,
                hardware="Intel Core i9-9940X",
                origin="fitted",
                source="Biscale, public artefact: least-squares fit to P99 latencies of 512 requests per setting",
                software="PyTorch on MicroK8s",
                date="2024-07-23",
            )
            for name, form in self.models
        }


OD: Final = Amdahl(
    gamma=148.81709977526535, delta=37.49369666805188, epsilon=5.432908755854746, eta=-15.475937098807677
)
"""YOLOv5n, object detection."""
OC: Final = Amdahl(gamma=34.69333807478468, delta=2.058115261491216, epsilon=19.478793326347812, eta=14.259440042600422)
"""ResNet18, object classification."""
AT: Final = Amdahl(gamma=59.135401329025065, delta=38.20569791416921, epsilon=160.62814762316182, eta=62.94940507943755)
"""FAIRSEQ S2T, audio to text."""
SA: Final = Amdahl(gamma=52.09085666977715, delta=5.927263430261823, epsilon=9.673022430669654, eta=2.9608878972217028)
"""DistilBERT, sentiment analysis."""
LI: Final = Amdahl(gamma=21.36871436832019, delta=1.5569641306191406, epsilon=53.785185960044615, eta=27.77545863159201)
"""XLM-RoBERTa, language identification."""
NT: Final = Amdahl(gamma=304.596066487657, delta=74.08666337647502, epsilon=-13.468936326215587, eta=11.630634430011373)
"""Elan-mt, neural translation."""
TS: Final = Amdahl(
    gamma=263.93594914585606, delta=83.63772165096029, epsilon=-1.006786216767125, eta=23.573866180316415
)
"""T5-small, text summarisation."""

VIDEO: Final = Pipeline("video", (("detect", OD), ("classify", OC)), 780, 8, 5, 4.384, 5.5)
AUDIO: Final = Pipeline("audio", (("transcribe", AT), ("sentiment", SA)), 1350, 8, 10, 8.5625, 7.0)
NLP: Final = Pipeline("nlp", (("identify", LI), ("translate", NT), ("summarise", TS)), 2550, 4, 10, 21.0, 12.0)
PIPELINES: Final = {pipeline.name: pipeline for pipeline in (VIDEO, AUDIO, NLP)}

MOTIVATION: Final = Pipeline("motivation", (("serve", Amdahl(35.0, 0.0, 0.0, 3.4)),), 500, 1, 5, 1.0, 5.5)
"""Made after what the motivation says: 26 requests per second on one core, 126 on eight, 130 on five times one."""
BURSTS: Final = {
    "burst": ((30, 20), (5, 120), (25, 20)),
    "plateau": ((10, 20), (40, 120), (10, 20)),
}
"""Seconds and rates of Fig. P4.1 and P4.2."""
