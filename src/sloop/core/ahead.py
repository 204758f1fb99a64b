"""What is still ahead of a request when it leaves a stage: the least time to the answer, as far as is believed.

A lower bound, for drop rules: the longest of the ways on that are sure, every stage on it taking its own least. Of
branches of which one is believed to be taken the quickest counts; what may be left out, a branch or a fan-out into less
than one part on average, counts for nothing. Where paths are declared, the quickest of those through the stage counts.
"""

from collections.abc import Mapping

from sloop.app.graph import Edge, Graph

Times = tuple[int, int]
"""In ns: alone at every stage, and in full batches of the plan."""

NOTHING: Times = (0, 0)


def ahead(graph: Graph, least_ns: Mapping[str, Times]) -> dict[str, Times]:
    """Per stage the least time from leaving it to the answer; `least_ns` is what each stage takes itself."""
    if graph.ways:
        return _along_paths(graph, least_ns)
    rest_ns: dict[str, Times] = {}
    for name in reversed(graph.steps):
        sure, either = NOTHING, list[Times]()
        for edge in graph.edges[name]:
            onward = _sum(least_ns[edge.target], rest_ns[edge.target])
            if edge.when is not None:
                either.append(onward)
            elif _is_sure(graph, edge):
                sure = _longer(sure, onward)
        if either and graph.is_exhaustive(name):
            sure = _longer(sure, (min(alone for alone, _ in either), min(full for _, full in either)))
        rest_ns[name] = sure
    return rest_ns


def _along_paths(graph: Graph, least_ns: Mapping[str, Times]) -> dict[str, Times]:
    rest_ns: dict[str, Times] = {}
    for path in graph.ways:
        onward = NOTHING
        for name in reversed(path.stages):
            alone, full = rest_ns.get(name, onward)
            rest_ns[name] = min(alone, onward[0]), min(full, onward[1])
            onward = _sum(least_ns[name], onward)
    return rest_ns


def _is_sure(graph: Graph, edge: Edge) -> bool:
    each = graph.steps[edge.target].each
    return each is None or each.mean >= 1.0


def _sum(one: Times, other: Times) -> Times:
    return one[0] + other[0], one[1] + other[1]


def _longer(one: Times, other: Times) -> Times:
    return max(one[0], other[0]), max(one[1], other[1])
