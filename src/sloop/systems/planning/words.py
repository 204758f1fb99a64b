"""Figures and paths as the explanations of a plan write them. Knows nothing of what they mean."""

from sloop.vocabulary import Path


def figure(value: float) -> str:
    """Four significant digits, whole from a thousand on."""
    return f"{value:,.0f}" if 1000 <= abs(value) < float("inf") else f"{value:.4g}"


def shown(path: Path) -> str:
    """`detect → read`."""
    return " → ".join(path.stages)
