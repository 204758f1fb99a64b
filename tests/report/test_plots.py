"""What plots show, without drawing."""

from sloop.actions import AcquireNode, StartWorker
from sloop.app.graph import Graph, GraphStage, When
from sloop.events import WOKE, Finished, NodeLost
from sloop.report.plots import (
    Mark,
    arrivals_figure,
    deadline_cdf,
    frontier_figure,
    hardware_timeline,
    latency_cdf,
    layers_figure,
    most_requests,
    route_cdf,
    sharing_figure,
    thin,
    timeline,
)
from sloop.runlog.summary import Figures, RunSummary
from sloop.units import ms, s
from sloop.vocabulary import BatchId, Node, Outcome, Path, ReplicaId, ReplicaSpec, Slot
from sloop.workload import trace_of
from tests.runlog.story import (
    GRAPH,
    STORY,
    Parts,
    Rows,
    arrived,
    asks,
    ended,
    finishes,
    runs,
    started,
    starts,
    told,
)


def test_a_timeline_ends_with_the_last_arrival() -> None:
    summary = RunSummary(GRAPH, start_ns=0).fold(STORY)
    figure = timeline({"one": summary, "two": summary})
    assert [panel.y_label for panel in figure.panels] == [
        "requests/s",
        "cores",
        "violations, %",
        "longest latency, ms",
    ]
    assert [series.name for series in figure.panels[1].series] == ["one", "two"]
    assert (figure.panels[0].series[0].x, figure.panels[0].series[0].y) == ((0.0, 1.0), (4.0, 2.0))
    assert figure.panels[2].series[0].y == (75.0, 100.0)
    assert "the worst second missed 100%" in figure.alt


def test_latencies_with_their_deadline() -> None:
    figure = latency_cdf({"one": RunSummary(GRAPH).fold(STORY), "silent": RunSummary(GRAPH)}, slo_ms=200)
    (panel,) = figure.panels
    assert [series.name for series in panel.series] == ["one"]
    assert (panel.series[0].x[0], panel.series[0].x[-1], panel.series[0].y[-1]) == (120.0, 220.0, 100.0)
    assert (panel.marks[0].name, panel.marks[0].at) == ("SLO 200 ms", 200)


def test_nothing_to_show() -> None:
    assert timeline({}).panels[0].series[0].x == ()
    assert latency_cdf({}).panels[0].series == ()


def test_thinning_keeps_the_worst() -> None:
    x = [float(place) for place in range(1000)]
    y = [0.0] * 1000
    y[777] = 5.0
    few_x, few_y = thin(x, y, 100)
    assert len(few_x) == 100
    assert max(few_y) == 5.0
    assert thin([1.0], [2.0]) == ([1.0], [2.0])
    assert thin([], []) == ([], [])


def test_one_curve_for_each_route_and_a_mark_for_each_deadline() -> None:
    paths = [Path(("a", "b"), ms(50)), Path(("a",), ms(90))]
    graph = Graph([GraphStage("a"), GraphStage("b", ("a",), (When("a", "kind", (1,)),))], paths, ms(100))
    rows: Rows = [(0, StartWorker(ReplicaId(n), ReplicaSpec(stage, "v", Slot(1.0)))) for n, stage in enumerate("ab")]
    for id, to_b in enumerate((1, 0, 0)):
        rows += [arrived(id, id, id, 1000), started(id, 2 * id, 0, id, stage="a")]
        rows += [(ms(id), Finished(BatchId(2 * id), ReplicaId(0), 1, ((to_b,),)))]
        if to_b:
            rows += [
                started(id, 2 * id + 1, 1, id, stage="b"),
                (ms(id), Finished(BatchId(2 * id + 1), ReplicaId(1), 1)),
            ]
        rows += [ended(id, id, Outcome.SERVED)]
    figure = route_cdf("static", RunSummary(graph, start_ns=0).fold(rows))
    assert [series.name for series in figure.panels[0].series] == ["a", "a, b"]
    assert [mark.at for mark in figure.panels[0].marks] == [50, 90]
    assert route_cdf("none", RunSummary(graph)).panels[0].series == ()


# Several applications, and the hardware that they share

NODES = [
    Node("n-fast", "fast", 8, 0, usd_per_h=2.0),
    Node("n-slow", "slow", 4, 0, usd_per_h=0.5, on_demand=True),
    Node("n-none", "unused", 4, 0, on_demand=True),
]


def of_two(nodes: list[Node]) -> RunSummary:
    """Application `a` has 4 and 0 requests in its first two seconds, `b` has 0 and 1."""
    rows = told(
        *(starts(0, 0, "a"), starts(1000, 1, "b", "slow"), (1000, AcquireNode("n-slow"))),
        *(asks(id, 500, "a") for id in range(4)),
        *(runs(500, 0, 0, "a", 0, 1, 2, 3), *finishes(550, 0, 0, 0, 1, 2, 3)),
        *(asks(9, 1200, "b"), runs(1200, 1, 1, "b", 9), *finishes(1300, 1, 1, 9, outcome=Outcome.LATE)),
        *((2500, NodeLost("n-slow", "it burns")), (3500, WOKE)),
    )
    return RunSummary([Parts("a"), Parts("b")], nodes=nodes, start_ns=0).fold(rows)


def test_applications_have_arrivals_of_their_own() -> None:
    figure = timeline(of_two(NODES).applications, name="applications", same_arrivals=False)
    assert [[series.name for series in panel.series] for panel in figure.panels] == [["a", "b"]] * 4
    (a, b) = figure.panels[0].series
    assert (a.kind, a.x, a.y, b.x, b.y) == ("steps", (0,), (4,), (0, 1), (0, 1))
    assert figure.panels[2].series[1].y == (0, 100)


def test_latencies_of_applications_are_relative_to_their_deadlines() -> None:
    figure = deadline_cdf(of_two(NODES).applications | {"silent": RunSummary(GRAPH)})
    (panel,) = figure.panels
    assert [(series.name, series.x[-1]) for series in panel.series] == [("a (100 ms)", 50), ("b (50 ms)", 200)]
    assert [mark.at for mark in panel.marks] == [100]
    assert "b p99 100 of 50 ms" in figure.alt


def test_the_mix_of_hardware_over_time_and_what_it_costs() -> None:
    figure = hardware_timeline(of_two(NODES))
    cores, nodes, money = figure.panels
    assert [(series.name, series.y) for series in cores.series] == [("fast", (2, 2, 2, 2)), ("slow", (0, 2, 2, 2))]
    assert [(series.name, series.x, series.y) for series in nodes.series] == [
        ("fast", (0, 3.5), (1, 1)),
        ("slow", (0, 1, 2.5, 3.5), (0, 1, 0, 0)),
    ]
    assert (money.series[0].x, money.series[0].y) == ((0, 1, 2.5, 3.5), (2, 2.5, 2, 2))
    assert figure.alt.endswith("at most 1 of fast, 1 of slow at once.")
    assert len(hardware_timeline(of_two([Node("n", "fast", 8, 0)])).panels) == 2, "nothing has a price"
    assert hardware_timeline(of_two([])).panels[1].series == ()


def test_only_so_many_applications_as_can_be_told_apart() -> None:
    busy, idle = of_two([]).applications["a"], RunSummary(GRAPH)
    names: dict[str, Figures] = {f"m{n}": idle for n in range(20)}
    assert list(most_requests(names | {"busy": busy}))[-1] == "busy"
    assert len(most_requests(names)) == 8
    assert list(most_requests({"a": idle})) == ["a"]


# Traces

TRACE = trace_of([0, s(0.5), s(2)], duration_ns=s(3), name="three", provenance="assumed: a test")


def test_every_second_has_its_count() -> None:
    series = arrivals_figure(TRACE).panels[0].series[0]
    assert list(series.x) == [0, 1, 2]
    assert list(series.y) == [2, 0, 1]


# Models


def test_layers_figure_shows_where_the_compute_sits() -> None:
    figure = layers_figure("m.onnx", [60, 30, 10], [10, 30, 60], [0, 1, 2])
    shares, held = figure.panels
    assert [series.y for series in shares.series] == [(60, 30, 10), (10, 30, 60)]
    assert list(shares.ticks) == ["1", "2", "3"]
    assert list(zip(held.series[0].x, held.series[0].y, strict=True)) == [(0, 0), (10, 60), (40, 90), (100, 100)]
    assert figure.alt.endswith("10 % of the weights hold half of the compute.")
    many = layers_figure("m.onnx", [1] * 100, [1] * 100, range(100))
    assert sum(bool(tick) for tick in many.panels[0].ticks) <= 40


def test_sharing_figure_shows_what_a_batch_costs_with_each_number_of_workers() -> None:
    figure = sharing_figure("m.onnx", [(1, 1.0), (2, 1.2), (4, 3.2)], {"bandwidth": [1.0, 1.3, 2.0, 3.0]})
    slower, each = figure.panels
    assert [(series.name, series.kind, series.y) for series in slower.series] == [
        ("measured", "points", (1.0, 1.2, 3.2)),
        ("bandwidth", "line", (1.0, 1.3, 2.0, 3.0)),
    ]
    assert [series.y for series in each.series] == [(1.0, 0.6, 0.8), (1.0, 0.65, 2 / 3, 0.75)]
    assert figure.alt.endswith("a batch costs least with 2.")


def test_the_frontier_is_a_line_below_which_there_is_nothing_cheaper() -> None:
    choices = [("mixed", 1.0, 0.5), ("harbor", 2.0, 0.9), ("mixed", 3.0, 0.8)]
    figure = frontier_figure(choices, [(1.0, 0.5), (2.0, 0.9)], 0.9)
    (panel,) = figure.panels
    line, *points = panel.series
    assert (line.x, line.y, line.kind) == ((1.0, 2.0, 3.0), (50.0, 90.0, 90.0), "steps")
    assert {series.name: list(zip(series.x, series.y, strict=True)) for series in points} == {
        "mixed": [(1.0, 50.0), (3.0, 80.0)],
        "harbor": [(2.0, 90.0)],
    }
    assert panel.marks == (Mark("wanted: 90 %", "y", 90.0),)
    assert "of 3 choices; 90 % from 2 USD per hour on" in figure.alt
    assert "at no price" in frontier_figure(choices, [(1.0, 0.5)], 0.9).alt
