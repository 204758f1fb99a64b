"""How accurate a pipeline is, from the accuracy of the variant that is active at each stage.

Three measures: `pas`, the product of accuracies as if errors were independent; `pas_rank`, the sum of ranks within the
stages (PAS'); `norm_prod`, the product of ranks lifted off zero. Source: IPA (Razavi, dissertation, chapter P3 and its
appendix); `norm_prod` after the settings of its public artefact, whose formula is not visible: 0.05 + 0.95 · rank.
"""

import math
from collections.abc import Sequence
from typing import Final, Literal

Measure = Literal["pas", "pas_rank", "norm_prod"]

RANK_MIN: Final = 0.05
"""What the least accurate variant counts in `norm_prod`, so that a product tells it from impossible."""


def fraction(accuracy: float) -> float:
    """An accuracy as a user wrote it, 0 to 1: values above 1 are percent."""
    return accuracy / 100.0 if accuracy > 1.0 else accuracy


def pas(accuracies: Sequence[float]) -> float:
    """End-to-end accuracy of one variant per stage: the product of fractions, 0 to 1."""
    return math.prod(accuracies)


def product(accuracies: Sequence[float]) -> float:
    """The product of accuracies as a user wrote them, on the scale they are on: per cent where one is above 1."""
    scale = 100.0 if max(accuracies) > 1.0 else 1.0
    return scale * math.prod(accuracy / scale for accuracy in accuracies)


def ranks(accuracies: Sequence[float], cores: Sequence[float], names: Sequence[str]) -> list[float]:
    """For each variant of one stage its place among them, from 0, the worst, to 1, the best, evenly spaced.

    Among equally accurate variants the one with fewer `cores` per replica ranks higher; then the later name. A variant
    that is alone ranks 1.
    """
    if len(accuracies) == 1:
        return [1.0]
    order = sorted(range(len(accuracies)), key=lambda index: (accuracies[index], -cores[index], names[index]))
    found = [0.0] * len(order)
    for place, index in enumerate(order):
        found[index] = place / (len(order) - 1)
    return found


def scores(measure: Measure, accuracies: Sequence[float], cores: Sequence[float], names: Sequence[str]) -> list[float]:
    """What each variant of one stage contributes to the measure; `combined` puts stages together."""
    if measure == "pas":
        return list(accuracies)
    placed = ranks(accuracies, cores, names)
    return placed if measure == "pas_rank" else [RANK_MIN + (1.0 - RANK_MIN) * rank for rank in placed]


def combined(measure: Measure, stages: Sequence[float]) -> float:
    """The measure of a pipeline from one score per stage: their sum for `pas_rank`, else their product."""
    return math.fsum(stages) if measure == "pas_rank" else math.prod(stages)
