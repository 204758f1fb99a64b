"""Requests with more rows than a forward pass takes: their pieces run beside each other, and they end once."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sloop.actions import Action, End, Piece, StartBatch
from sloop.app.graph import Each
from sloop.events import BatchFailed, Cancelled, Finished, WorkerLost
from sloop.policies.drop import Never
from sloop.units import ms
from sloop.vocabulary import Outcome, RequestId, WorkerId
from tests.core.scene import Scene, graph, one_each
from tests.core.test_lanes import arrive, request, warm


def split(count: int = 1, batch_max: int = 4, **options: object) -> Scene:
    """Replicas of a model that keeps rows apart. A pass takes up to 4 rows, and n rows take (10 + n) ms."""
    scene = warm(count, batch_max, **options)
    stage = scene.application.stages["only"]
    stage.is_divided = True
    for belief in stage.beliefs.values():
        belief.batch_max = batch_max  # type: ignore[misc]  # of this test
    stage.refresh()
    return scene


def orders(actions: Sequence[Action]) -> list[StartBatch]:
    return [action for action in actions if isinstance(action, StartBatch)]


def ends(actions: Sequence[Action]) -> dict[int, Outcome]:
    found = [(action.request, action.outcome) for action in actions if isinstance(action, End)]
    assert len(dict(found)) == len(found), "each request ends once"
    return dict(found)


def pieces(actions: Sequence[Action]) -> list[list[tuple[int, int]]]:
    """Of each order, the requests with the first row of the piece; -1 for a whole one."""
    return [
        [(id, -1 if piece is None else piece.first) for id, piece in zip(order.requests, of_order(order), strict=True)]
        for order in orders(actions)
    ]


def of_order(order: StartBatch) -> Sequence[Piece | None]:
    return order.pieces or [None] * len(order.requests)


def finish(scene: Scene, at_ms: float, order: StartBatch) -> list[Action]:
    return scene.act(at_ms, Finished(order.batch, order.replica, ms(1)))


def test_pieces_run_one_after_the_other_on_one_replica_and_the_last_one_answers() -> None:
    scene = split()
    (first,) = orders(scene.act(0, request(0, 10)))
    assert (first.pieces, first.rows) == ((Piece(0, 4, 10),), 4)
    (second,) = orders(middle := finish(scene, 14, first))
    assert (second.pieces, ends(middle)) == ((Piece(4, 4, 10),), {})
    (third,) = orders(middle := finish(scene, 28, second))
    assert (third.pieces, third.rows, ends(middle)) == ((Piece(8, 2, 10),), 2, {})
    assert ends(finish(scene, 40, third)) == {0: Outcome.SERVED}
    assert scene.is_idle
    assert not scene.application.stages["only"].split


def test_pieces_run_beside_each_other_and_the_last_one_with_another_request() -> None:
    scene = split(3)
    started = orders(arrive(scene, request(0, 10), request(1, 2)))
    assert pieces(started) == [[(0, 0)], [(0, 4)], [(0, 8), (1, -1)]]
    assert [order.rows for order in started] == [4, 4, 4]
    assert ends(finish(scene, 14, started[2])) == {1: Outcome.SERVED}
    assert ends(finish(scene, 15, started[0])) == {}
    assert ends(finish(scene, 16, started[1])) == {0: Outcome.SERVED}


def test_a_request_that_fits_a_pass_and_one_whose_rows_may_meet_run_whole() -> None:
    scene = split()
    assert pieces(scene.act(0, request(0, 4))) == [[(0, -1)]]
    scene = split()
    scene.application.stages["only"].is_divided = False
    (order,) = orders(scene.act(0, request(0, 10)))
    assert (order.pieces, order.rows) == ((), 10)


def test_what_waits_behind_a_large_request_runs_between_its_pieces_if_it_is_due_earlier() -> None:
    scene = split()
    (first,) = orders(scene.act(0, request(0, 8, slo_ms=900)))
    scene.act(1, request(1, at_ms=1, slo_ms=100))
    (second,) = orders(finish(scene, 14, first))
    assert second.requests[0] == 1


def test_a_model_that_fails_on_one_piece_ends_the_request_once() -> None:
    scene = split(2)
    first, second = orders(scene.act(0, request(0, 12)))
    failed = scene.act(5, BatchFailed(first.batch, first.replica, "no"))
    assert ends(failed) == {0: Outcome.FAILED}
    assert orders(failed) == [], "the rest is not begun"
    assert ends(finish(scene, 14, second)) == {}
    assert ends(scene.act(20, *[request(1, at_ms=20)])) == {}
    assert scene.application.stages["only"].split == {}


def test_a_piece_whose_replica_is_lost_is_tried_again_alone() -> None:
    scene = split(2)
    first, second = orders(scene.act(0, request(0, 8)))
    scene.act(5, WorkerLost(WorkerId(first.replica), "gone"))
    (again,) = orders(middle := finish(scene, 14, second))
    assert (again.pieces, ends(middle)) == (first.pieces, {})
    assert ends(finish(scene, 30, again)) == {0: Outcome.SERVED}


def test_a_client_that_leaves_ends_what_waits_and_what_runs() -> None:
    scene = split()
    (first,) = orders(scene.act(0, request(0, 8)))
    assert ends(scene.act(5, Cancelled(RequestId(0)))) == {0: Outcome.DROPPED}
    later = finish(scene, 14, first)
    assert (ends(later), orders(later)) == ({}, [])
    assert scene.is_idle


def test_a_request_is_dropped_if_its_other_pieces_cannot_be_in_time() -> None:
    """Three pieces take 40 ms on one replica; another request delays it. On three replicas, one pass is enough."""
    scene = split()
    scene.act(0, request(0, 1))
    (order,) = orders(scene.actions)
    assert ends(scene.act(1, request(1, 12, at_ms=1, slo_ms=41))) == {}
    assert ends(finish(scene, 11, order)) == {0: Outcome.SERVED, 1: Outcome.DROPPED}
    scene = split(3)
    assert len(orders(scene.act(0, request(1, 12, slo_ms=20)))) == 3


CHAIN = graph(a={}, b={"after": ("a",)})


def test_a_stage_behind_others_gets_all_rows_when_the_last_piece_is_done() -> None:
    scene = Scene(one_each(CHAIN), application=CHAIN, drop=Never())
    scene.warm_up()
    for stage in scene.application.stages.values():
        stage.is_divided = True
        for belief in stage.beliefs.values():
            belief.batch_max = 4  # type: ignore[misc]  # of this test
    (first,) = orders(scene.act(0, request(0, 6)))
    assert first.pieces == (Piece(0, 4, 6),)
    (second,) = orders(finish(scene, 14, first))
    assert (second.stage, second.pieces) == ("a", (Piece(4, 2, 6),))
    (third,) = orders(scene.act(28, Finished(second.batch, second.replica, ms(1), sizes=(((2, 32),),))))
    assert (third.stage, third.pieces, third.size) == ("b", (Piece(0, 4, 6),), 32)
    (last,) = orders(finish(scene, 40, third))
    assert ends(finish(scene, 60, last)) == {0: Outcome.SERVED}


@pytest.mark.parametrize(("told", "expected"), [((1, 8), (3, 8)), ((0, 8), (1, 24))])
def test_what_parts_pass_on_adds_up_where_they_join(told: tuple[int, int], expected: tuple[int, int]) -> None:
    """As rows or, if the model behind may mix them, as the size of one row; a part that goes elsewhere passes on
    nothing."""
    application = graph(
        find={}, read={"after": ("find",), "each": Each("find", mean=4.0)}, tell={"after": ("read",), "join": True}
    )
    scene = Scene(one_each(application), application=application, drop=Never())
    scene.warm_up()
    (find,) = orders(scene.act(0, request(0)))
    read = orders(scene.act(14, Finished(find.batch, find.replica, ms(1), ((4,),))))
    while read[-1].stage != "tell":
        order, count = read[-1], len(read[-1].requests)
        taken = tuple([(int(part != 2),) for part in order.parts])
        finished = Finished(order.batch, order.replica, ms(1), taken, sizes=((told,),) * count)
        read += orders(scene.act(30 * len(read), finished))
    assert (read[-1].rows, read[-1].size) == expected


@given(
    st.lists(st.tuples(st.integers(1, 13), st.integers(0, 30), st.booleans()), min_size=1, max_size=12),
    st.integers(1, 3),
    st.data(),
)
def test_every_row_runs_once_and_every_request_ends_once(
    given: Sequence[tuple[int, int, bool]], replicas: int, data: st.DataObject
) -> None:
    scene = split(replicas, drop=Never())
    now_ms, actions = 0, list[Action]()
    for id, (rows, wait_ms, _) in enumerate(given):
        now_ms += wait_ms
        actions += scene.act(now_ms, request(id, rows, at_ms=now_ms, slo_ms=100_000))
    running, ran, known = list[StartBatch](), dict[int, list[int]](), 0
    while True:
        running += orders(actions[known:])
        known = len(actions)
        if not running:
            break
        order = running.pop(data.draw(st.integers(0, len(running) - 1)))
        assert order.rows <= 4
        for id, piece in zip(order.requests, of_order(order), strict=True):
            whole = range(given[id][0])
            ran.setdefault(id, []).extend(whole if piece is None else whole[piece.first : piece.first + piece.rows])
        now_ms += 20
        actions += finish(scene, now_ms, order)
    assert {id: sorted(rows) for id, rows in ran.items()} == {
        id: list(range(rows)) for id, (rows, _, _) in enumerate(given)
    }
    assert ends(actions) == dict.fromkeys(range(len(given)), Outcome.SERVED)


def test_the_end_of_a_batch_is_simple_again_when_no_pieces_are_left() -> None:
    """As for stages where no request was ever split; also if the request ends while its pieces wait."""
    scene = split()
    stage = scene.application.stages["only"]

    def finishes_each() -> bool:
        return stage.finishes_each

    (first,) = orders(scene.act(0, request(0, 6)))
    assert finishes_each()
    (second,) = orders(finish(scene, 14, first))
    finish(scene, 28, second)
    assert not finishes_each()
    scene.act(30, request(1, 1))
    scene.act(31, request(2, 6, at_ms=31))
    assert finishes_each()
    scene.act(32, Cancelled(RequestId(2)))
    assert stage.split == {}
    assert not finishes_each()
