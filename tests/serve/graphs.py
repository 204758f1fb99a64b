"""Graphs written short."""

from collections.abc import Mapping, Sequence

from sloop.app.graph import Graph, GraphStage


def graph_of(after: Mapping[str, Sequence[str]]) -> Graph:
    """Stages, each with those it comes after; every request passes all of them."""
    return Graph([GraphStage(name, tuple(before)) for name, before in after.items()])
