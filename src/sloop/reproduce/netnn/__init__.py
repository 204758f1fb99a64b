"""NetNN reproduced: inference inside the network, its tables by execution, its latency claims, its orders of accuracy.

Source: Razavi, Resource Efficient Inference Serving with SLO Guarantee (dissertation, TU Darmstadt 2024), chapters P5
("Distributed Serving", a calculation) and P6 ("NetNN", emulated switches that detect intrusions). Its captures are not
public: accuracies are of synthetic traffic, and only their orders say anything.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Final

from sloop.innet.accuracy import AccuracyComparison, compare
from sloop.report.plots import Figure, Mark, Panel, Series
from sloop.reproduce.harness import Progress, Reproduction, bars, silent
from sloop.reproduce.netnn.offline import (
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
from sloop.reproduce.rows import Claim, Row, directed
from sloop.text import counted

SOURCE: Final = "Razavi, dissertation, TU Darmstadt 2024, chapters P5 and P6 (Distributed Serving, NetNN)"
FLOWS, FLOWS_QUICK = 200, 120
PACKETS, PACKETS_QUICK = 1100, 70
"""Of a flow: all eleven inference points, or seven."""
SEEDS: Final = (1, 2, 3)
MASKED: Final = "network, flows split, identity masked"
SPLITS: Final = ("network, packets split, identity seen", "network, flows split, identity seen", MASKED)
PUBLISHED: Final = {
    ("packet", "trees"): 58.0,
    ("packet", "trees, random tenth"): 51.0,
    ("packet", "network of packets"): 83.0,
    ("flow", "trees"): 94.0,
    ("flow", "trees, random tenth"): 62.0,
    ("flow", SPLITS[0]): 99.0,
    ("flow", "network, integers"): 97.0,
}
"""Accuracies in %, as published for captures that are not public. The published split is not described."""
POINT_LOSS: Final = 1.0
"""Points in % by which more votes may lower the accuracy."""
ROUNDING_LOSS: Final = 3.0
"""Points in % that integers may lose; published: 99 and 97."""


def reproduce(*, quick: bool, data: Path | None, processes: int = 0, progress: Progress = silent) -> Reproduction:
    """All rows; `quick` executes fewer inferences and trains on fewer flows, one seed. `data` and `processes` are not
    used: training and execution are matrices, which already use all cores."""
    progress(0.0, "tables and latencies")
    rows = [*cost_rows(), *latency_rows(), *time_rows(), *runtime_rows()]
    progress(0.05, "an inference, packet by packet")
    counts, _, program = executed()
    rows += execution_rows(counts, program)
    progress(0.1, "emulator beside reference")
    rows += agreement_rows(quick=quick)
    steps = iter(range(1, 100))
    seeds = SEEDS[:1] if quick else SEEDS

    def trained(line: str) -> None:
        progress(min(0.99, 0.2 + 0.8 * next(steps) / (6 * len(seeds))), line)

    found = compare(
        flows=FLOWS_QUICK if quick else FLOWS,
        packets=PACKETS_QUICK if quick else PACKETS,
        seeds=seeds,
        report=trained,
    )
    rows += accuracy_rows(found)
    figures = (latency_figure(), operations_figure(rows), accuracy_figure(found), points_figure(found))
    assumed = (
        "operations of one pass, A: not published; 10, and the least values with which the claims hold",
        "passes of 400 ns, links of 500 ns, 5 products a pass: ours, since the papers measure no latency",
        "what Table P6.1 counts: inferred; 14 operations a product, registers and additions, no comparisons",
        f"traffic: synthetic, {found.flows} flows a seed; lengths, gaps and headers differ by knobs that were set so "
        "that trees on single packets and the network on headers reach about the published accuracies",
    )
    return Reproduction("netnn", SOURCE, tuple(rows), figures, assumed)


def accuracy_rows(found: AccuracyComparison) -> list[Row]:
    """Orders of accuracies on synthetic traffic, all three splits side by side."""
    packet = {name: [100 * value for value in values] for name, values in found.packet.items()}
    flow = {name: [100 * value for value in values] for name, values in found.flow.items()}
    means = {("packet", name): fmean(values) for name, values in packet.items()}
    means |= {("flow", name): fmean(values) for name, values in flow.items()}

    def row(of: str, name: str, *, holds: bool, expect: str) -> Row:
        claim = Claim("accuracy", f"{name}, by {of}", "%", paper=PUBLISHED.get((of, name)), note=_tested(found))
        return directed(claim, (packet if of == "packet" else flow)[name], holds=holds, expect=expect)

    tenth, trees, alone = (means["packet", name] for name in ("trees, random tenth", "trees", "network of packets"))
    flow_tenth, flow_trees, masked = (means["flow", name] for name in ("trees, random tenth", "trees", MASKED))
    whole = means["flow", MASKED]
    rows = [
        row(
            "packet", "trees, random tenth", holds=45 <= tenth <= trees, expect="about a half, no more than all buckets"
        ),
        row("packet", "trees", holds=tenth <= trees < alone, expect="less than headers tell"),
        row("packet", "network of packets", holds=alone > trees, expect="more than length and gap tell"),
        row("flow", "trees, random tenth", holds=flow_tenth < flow_trees, expect="less than all buckets"),
        row("flow", "trees", holds=flow_trees <= masked, expect="no more than the network"),
        *(row("flow", name, holds=means["flow", name] >= flow_trees, expect="no less than trees") for name in SPLITS),
        *(
            row("packet", name, holds=means["packet", name] > trees, expect="more than length and gap tell")
            for name in SPLITS
        ),
        row(
            "flow",
            "network, integers",
            holds=abs(means["flow", "network, integers"] - whole) <= ROUNDING_LOSS,
            expect=f"within {ROUNDING_LOSS:g} points of floats",
        ),
    ]
    bit, byte, base10 = (means["packet", name] for name in (MASKED, "network, byte", "network, base10"))
    rows += [
        row("packet", "network, byte", holds=bit >= byte, expect="no more than bits"),
        row("packet", "network, base10", holds=byte >= base10, expect="no more than bytes"),
    ]
    return [*rows, *_point_rows(found)]


def _tested(found: AccuracyComparison) -> str:
    """What an accuracy comes from: a fifth of the flows is for the test."""
    seeds = counted(len(found.seeds), "seed")
    return f"synthetic traffic, {found.flows // 5} flows tested, {seeds}"


def _means_by_points(found: AccuracyComparison) -> list[float]:
    return [100 * fmean(values) for values in zip(*found.by_points, strict=True)]


def _point_rows(found: AccuracyComparison) -> list[Row]:
    """Figure P6.6: votes of more inference points."""
    means = _means_by_points(found)
    drops = [after - before for before, after in pairwise(means)]
    rows = [
        directed(
            Claim("accuracy", "largest loss by one more point's vote", "points", note=_tested(found)),
            [-min(0.0, *drops)],
            holds=min(drops) >= -POINT_LOSS,
            expect=f"at most {POINT_LOSS:g} point",
        )
    ]
    for points, least in ((4, 90), (8, 95)):
        votes = [100 * values[min(points, len(values)) - 1] for values in found.by_points]
        index = 2 ** (min(points, len(means)) - 1)
        claim = Claim(
            "accuracy",
            f"votes of {points} points (up to packet {index})",
            "%",
            paper=least,
            note=f"{_tested(found)}; read as packets, {points} packets have {points.bit_length()} points: "
            f"{means[points.bit_length() - 1]:.1f} %",
        )
        rows.append(directed(claim, votes, holds=fmean(votes) >= least, expect=f"at least {least} %"))
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
