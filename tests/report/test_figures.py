"""What plots will show, without drawing."""

from sloop.actions import End, StartBatch
from sloop.app.graph import Graph, Step, When
from sloop.events import Finished
from sloop.report.figures import comparison, latency_cdf, thin, timeline, ways_cdf
from sloop.report.metrics import Metrics, fold
from sloop.runlog import Record
from sloop.units import ms
from sloop.vocabulary import BatchId, Outcome, Path, ReplicaId, Request, RequestId

Rows = list[tuple[int, Record]]


def test_a_timeline_ends_with_the_last_arrival(story: Rows) -> None:
    metrics = fold(story, Metrics(start_ns=0))
    figure = timeline({"one": metrics, "two": metrics})
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


def test_latencies_with_their_deadline(story: Rows) -> None:
    figure = latency_cdf({"one": fold(story, Metrics()), "silent": Metrics()}, slo_ms=200)
    (panel,) = figure.panels
    assert [series.name for series in panel.series] == ["one"]
    assert (panel.series[0].x[0], panel.series[0].x[-1], panel.series[0].y[-1]) == (120.0, 220.0, 100.0)
    assert (panel.marks[0].name, panel.marks[0].at) == ("SLO 200 ms", 200)


def test_nothing_to_show() -> None:
    assert timeline({}).panels[0].series[0].x == ()
    assert latency_cdf({}).panels[0].series == ()
    assert comparison([]).panels[0].ticks == ()


def test_runs_side_by_side(story: Rows) -> None:
    row = fold(story, Metrics(start_ns=0)).row(system="static", seed=1)
    figure = comparison([row, row])
    assert figure.panels[0].ticks == ("static", "static")
    assert "static 83.33 %" in figure.alt


def test_thinning_keeps_the_worst() -> None:
    x = [float(place) for place in range(1000)]
    y = [0.0] * 1000
    y[777] = 5.0
    few_x, few_y = thin(x, y, 100)
    assert len(few_x) == 100
    assert max(few_y) == 5.0
    assert thin([1.0], [2.0]) == ([1.0], [2.0])
    assert thin([], []) == ([], [])


def test_one_curve_for_each_way_and_a_mark_for_each_deadline() -> None:
    ways = [Path(("a", "b"), ms(50)), Path(("a",), ms(90))]
    graph = Graph([Step("a"), Step("b", ("a",), (When("a", "kind", (1,)),))], ways, ms(100))
    rows: list[tuple[int, Record]] = []
    for number, way in enumerate(((1,), (0,), (0,))):
        id, batch = RequestId(number), StartBatch(BatchId(2 * number), ReplicaId(0), "a", (RequestId(number),))
        rows += [(ms(number), Request(id, ms(number), ms(number), ms(1000))), (ms(number), batch)]
        rows += [(ms(number), Finished(batch.batch, ReplicaId(0), 1, (way,)))]
        if way[0]:
            second = StartBatch(BatchId(2 * number + 1), ReplicaId(0), "b", (id,))
            rows += [(ms(number), second), (ms(number), Finished(second.batch, ReplicaId(0), 1))]
        rows += [(ms(number), End(id, Outcome.SERVED))]
    figure = ways_cdf("static", fold(rows, Metrics(start_ns=0, graph=graph)))
    assert [series.name for series in figure.panels[0].series] == ["a", "a, b"]
    assert [mark.at for mark in figure.panels[0].marks] == [50, 90]
    assert ways_cdf("none", Metrics()).panels[0].series == ()
