"""NetNN reproduced: inference inside the network, its tables by execution, its latency claims, its orders of accuracy.

Source: Razavi, Resource Efficient Inference Serving with SLO Guarantee (dissertation, TU Darmstadt 2024), chapters P5
("Distributed Serving", a calculation) and P6 ("NetNN", emulated switches that detect intrusions). Its captures are not
public: accuracies are of synthetic traffic, and only their orders say anything.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Final

from sloop.api import counted
from sloop.api.reports import Figure, Mark, Panel, Series
from sloop_systems.comparison.harness import Progress, Reproduction, bars, in_parallel, silent
from sloop_systems.comparison.rows import Claim, Judged, Row, bounded, directed, minus
from sloop_systems.netnn.accuracy import (
    ALONE,
    INTEGERS,
    MODELS,
    NETWORKS,
    OTHERS,
    TENTH,
    TREES,
    AccuracyComparison,
    AccuracyTrial,
    Protocol,
    play,
    together,
)
from sloop_systems.netnn.experiments.offline import (
    OPERATIONS_AT,
    TABLE_6,
    agreement_rows,
    cost_rows,
    executed,
    execution_rows,
    latencies_ms,
    latency_rows,
    runtime_rows,
    time_rows,
)

SOURCE: Final = "Razavi, dissertation, TU Darmstadt 2024, chapters P5 and P6 (Distributed Serving, NetNN)"
FLOWS, FLOWS_QUICK = 700, 120
PACKETS, PACKETS_QUICK = 1100, 70
"""Of a flow: all eleven inference points, or seven."""
TESTED: Final = 0.36
"""Of the flows: 252 for each seed, so that one flow is 0.4 points. 448 are enough for training:
with 160, the network on bytes does not yet tell more than the one on numbers of headers."""
SEEDS: Final = (1, 2, 3, 4)
MASKED: Final = NETWORKS[Protocol.FLOWS_MASKED]
SPLITS: Final = (*NETWORKS.values(),)
BYTE, BASE10 = OTHERS.values()
PUBLISHED: Final = {
    ("packet", TREES): 58.0,
    ("packet", TENTH): 51.0,
    ("packet", ALONE): 83.0,
    ("flow", TREES): 94.0,
    ("flow", TENTH): 62.0,
    ("flow", SPLITS[0]): 99.0,
    ("flow", INTEGERS): 97.0,
}
"""Accuracies in %, as published for captures that are not public. The published split is not described."""
POINT_LOSS: Final = 1.0
"""Points in % by which more votes may lower the accuracy."""
KNOBS: Final = (
    "the generator's knobs, so that trees on single packets and the network on headers are near their figures"
)
NO_TREES: Final = (
    "networks alone: scikit-learn is not installed (pip install scikit-learn), so rows that compare with trees are "
    "left out"
)
ROUNDING_LOSS: Final = 3.0
"""Points in % that integers may lose; published: 99 and 97."""


def reproduce(*, quick: bool, data: Path | None, processes: int = 0, progress: Progress = silent) -> Reproduction:
    """All rows; `quick` executes fewer inferences, trains on fewer flows of one seed, and leaves out other
    representations of the features. Without scikit-learn, rows that compare with decision trees are left out. `data` is
    not used: the published captures are not public."""
    progress(0.0, "tables and latencies")
    rows = [*cost_rows(), *latency_rows(), *time_rows(), *runtime_rows()]
    progress(0.05, "an inference, packet by packet")
    counts, _, program = executed()
    rows += execution_rows(counts, program)
    progress(0.1, "emulator beside reference")
    rows += agreement_rows(quick=quick)
    has_trees = find_spec("sklearn") is not None
    left_out = {*(OTHERS.values() if quick else ()), *(() if has_trees else (TREES,))}
    models = [name for name in MODELS if name not in left_out]
    flows, packets = (FLOWS_QUICK, PACKETS_QUICK) if quick else (FLOWS, PACKETS)
    trials = [
        AccuracyTrial(model, seed, flows, packets, TESTED) for model in models for seed in SEEDS[: 1 if quick else None]
    ]
    found = together(
        in_parallel(
            play,
            trials,
            processes=processes,
            progress=lambda share, what: progress(0.2 + 0.79 * share, what),
            what=lambda trial, _: f"seed {trial.seed}: {trial.model}",
        )
    )
    rows += accuracy_rows(found)
    figures = (latency_figure(), operations_figure(rows), accuracy_figure(found), points_figure(found))
    assumed = (
        "operations of one pass, A: not published; 10, and the least values with which the claims hold",
        "passes of 400 ns, links of 500 ns, 5 products a pass: ours, since the papers measure no latency",
        "what Table P6.1 counts: inferred; 14 operations a product, registers and additions, no comparisons",
        f"traffic: synthetic, {flows} flows a seed, of which {found.tested} are only tested; lengths, gaps and headers "
        "differ by knobs that were set so that trees on single packets and the network on headers reach about the "
        "published accuracies",
        *(() if has_trees else (NO_TREES,)),
    )
    return Reproduction(
        "netnn",
        SOURCE,
        tuple(rows),
        figures,
        assumed,
        models="perceptrons and recurrent networks on switches, and decision trees to compare with",
        deadlines="none: latencies are compared",
    )


def accuracy_rows(found: AccuracyComparison) -> list[Row]:
    """Orders of accuracies on synthetic traffic, all three splits side by side. An order with "more" or "less" holds if
    the whole 95 % interval of the difference says so; one with "no less" if the interval does not contradict it."""
    by = {
        of: {name: [100 * value for value in values] for name, values in table.items()}
        for of, table in (("packet", found.packet), ("flow", found.flow))
    }

    def row(of: str, name: str, other: str, expect: str, least: float = 0.0, judged: Judged = "interval") -> Row:
        figures = [PUBLISHED.get((of, each)) for each in (name, other)]
        paper = None if figures[0] is None or figures[1] is None else figures[0] - figures[1]
        means = " and ".join(f"{fmean(by[of][each]):.1f} %" for each in (name, other))
        claim = Claim(
            "accuracy", f"{name} - {other}, by {of}", "points", paper=paper, note=f"{means}; {_tested(found)}"
        )
        above = minus(by[of][name], by[of][other])
        if judged == "interval":
            return directed(claim, above, expect, above=least, of=judged)
        return directed(claim, above, expect, at_least=least, of=judged)

    rows = []
    if TREES in by["packet"]:
        rows += [
            row("packet", TREES, TENTH, "all buckets tell no less", judged="doubt"),
            row("packet", ALONE, TREES, "headers tell more than length and gap"),
            row("flow", TREES, TENTH, "all buckets tell more"),
            *(row("flow", name, TREES, "no less than trees", judged="doubt") for name in SPLITS),
            *(row("packet", name, TREES, "more than length and gap tell") for name in SPLITS),
        ]
    rows.append(row("flow", INTEGERS, MASKED, "hardly less than floats", -ROUNDING_LOSS, "mean"))
    if BYTE in by["packet"]:
        for of in by:
            rows += [
                row(of, MASKED, BYTE, "bytes tell no more than bits", judged="doubt"),
                row(of, BYTE, BASE10, "digits tell no more than bytes", judged="doubt"),
            ]
    return [*rows, *_point_rows(found)]


def _tested(found: AccuracyComparison) -> str:
    """What an accuracy comes from."""
    return f"synthetic traffic, {found.tested} flows tested with each of {counted(len(found.seeds), 'seed')}"


def _means_by_points(found: AccuracyComparison) -> list[float]:
    return [100 * fmean(values) for values in zip(*found.by_points, strict=True)]


def _point_rows(found: AccuracyComparison) -> list[Row]:
    """Figure P6.6: votes of more inference points."""
    points = [[100 * values[place] for values in found.by_points] for place in range(len(found.by_points[0]))]
    means = _means_by_points(found)
    worst = min((minus(after, before) for before, after in pairwise(points)), key=fmean)
    claim = Claim("accuracy", "least gain of one more vote", "points", note=_tested(found))
    rows = [directed(claim, worst, f"a loss of at most {POINT_LOSS:g} point", at_least=-POINT_LOSS)]
    for count, least in ((4, 90), (8, 95)):
        votes = points[min(count, len(points)) - 1]
        index = 2 ** (min(count, len(points)) - 1)
        claim = Claim(
            "accuracy",
            f"votes of {count} points (up to packet {index})",
            "%",
            paper=least,
            note=f"{_tested(found)}; read as packets, {count} packets have {count.bit_length()} points: "
            f"{means[count.bit_length() - 1]:.1f} %",
            fitted=KNOBS,
        )
        rows.append(bounded(claim, votes, at_least=least, mean=True))
    return rows


def latency_figure() -> Figure:
    """The paper's latencies by the constant that it does not state."""
    x = tuple(map(float, OPERATIONS_AT))
    both = [latencies_ms(at) for at in OPERATIONS_AT]
    series = tuple(
        Series(name, x, tuple(pair[place] for pair in both))
        for place, name in enumerate(("slowest layer", "all layers"))
    )
    marks = (Mark("claimed, all layers", "y", 2.0), Mark("claimed, slowest layer", "y", 1.0))
    return Figure(
        name="latency",
        title="mini-AlexNet on seven switches: latency by operations of one pass",
        x_label="operations of one pass",
        panels=(Panel(y_label="ms", series=series, marks=marks),),
        alt="; ".join(
            f"{at} operations: {slowest:.2f} and {total:.2f} ms" for at, (slowest, total) in zip(x, both, strict=True)
        ),
    )


def operations_figure(rows: Sequence[Row]) -> Figure:
    """Table P6.1: operations of a packet, published and executed."""
    chosen = [row for row in rows if row.metric.startswith("operations of a packet")]
    published = Series(
        "published", tuple(map(float, range(len(chosen)))), tuple(row.paper or 0.0 for row in chosen), "bars"
    )
    ours = Series("executed", published.x, tuple(row.ours for row in chosen), "bars")
    return Figure(
        name="operations",
        title="Operations of the most expensive packet",
        x_label="",
        panels=(Panel(y_label="operations", ticks=tuple(TABLE_6), series=(published, ours)),),
        alt="; ".join(f"{row.metric}: {row.ours:g}" for row in chosen),
    )


def accuracy_figure(found: AccuracyComparison) -> Figure:
    """Figures P6.2 and P6.7: accuracies by model, split and representation."""
    names = tuple(found.flow)
    percent = [[100 * value for value in found.flow[name]] for name in names]
    return Figure(
        name="accuracy",
        title="Accuracy by flow, synthetic traffic: only the order counts",
        x_label="",
        panels=(Panel(y_label="%", ticks=names, series=(bars("flows", percent),)),),
        alt="; ".join(f"{name}: {fmean(values):.1f} %" for name, values in zip(names, percent, strict=True)),
    )


def points_figure(found: AccuracyComparison) -> Figure:
    """Figure P6.6: accuracy by the number of inference points that vote."""
    means = _means_by_points(found)
    series = Series("network, identity masked", tuple(map(float, range(1, len(means) + 1))), tuple(means), "line")
    return Figure(
        name="points",
        title="Accuracy by flow with the votes of its first inference points, synthetic traffic",
        x_label="inference points; the n-th is at packet 2^(n - 1)",
        panels=(Panel(y_label="%", series=(series,), marks=(Mark("90 %", "y", 90.0), Mark("95 %", "y", 95.0))),),
        alt="; ".join(f"{at} points: {value:.1f} %" for at, value in enumerate(means, start=1)),
    )
