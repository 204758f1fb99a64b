"""Proactive drops in small graphs that are played to their end: no noise, one replica a stage, batches of one, one
deadline for all."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from sloop.actions import End, StartBatch
from sloop.core.protocols import Drop
from sloop.events import Finished
from sloop.policies.drop import Never, PredictiveDrop
from sloop.units import ms
from sloop.vocabulary import Outcome, RequestId
from tests.core.scene import Scene, graph, one_each, request

SHAPES = (
    graph(a={}, b={"after": ("a",)}),
    graph(a={}, b={"after": ("a",)}, c={"after": ("b",)}),
    graph(a={}, b={"after": ("a",)}, c={"after": ("a",)}, d={"after": ("b", "c")}),
)


@dataclass
class Played:
    """What became of the requests."""

    outcomes: dict[RequestId, Outcome] = field(default_factory=dict)
    work_ns: Counter[RequestId] = field(default_factory=Counter)

    def count(self, outcome: Outcome) -> int:
        return list(self.outcomes.values()).count(outcome)

    @property
    def wasted_ns(self) -> int:
        """Of requests that were not in time."""
        return sum(each for id, each in self.work_ns.items() if self.outcomes[id] is not Outcome.SERVED)


def play(
    shape: int, times: Sequence[float], sent_ms: Sequence[float], slo_ms: float, drop: Drop, mean_ratio: float = 1.0
) -> Played:
    """A visit to the n-th stage is believed to take 11 ms times the n-th factor, and takes `mean_ratio` times as long,
    which is known."""
    application = SHAPES[shape]
    scene = Scene(one_each(application, batch_max=1), application=application, drop=drop)
    scene.warm_up()
    for stage, factor in zip(scene.application.all_stages, times, strict=False):
        belief = scene.beliefs[stage.name, "a", ""]
        belief.times, belief.mean_ratio = factor, mean_ratio
        scene.application.refresh(stage)
    numbers, played, coming = count(), Played(), list[tuple[int, int, object]]()
    for id, at_ms in enumerate(sent_ms):
        heappush(coming, (ms(at_ms), next(numbers), request(id, at_ms=at_ms, slo_ms=slo_ms)))
    while coming:
        now_ns, _, event = heappop(coming)
        more = bool(coming) and coming[0][0] == now_ns
        for action in scene.core.handle(now_ns, event, more):  # type: ignore[arg-type]
            if isinstance(action, StartBatch):
                taken_ns = round(mean_ratio * scene.application.stages[action.stage].pool.least_ns()[0])
                played.work_ns[action.requests[0]] += taken_ns
                done = Finished(action.batch, action.replica, taken_ns)
                heappush(coming, (now_ns + taken_ns, next(numbers), done))
            elif isinstance(action, End):
                played.outcomes[action.request] = action.outcome
    return played


World = tuple[int, list[float], list[float], float]
worlds = st.tuples(
    st.integers(0, len(SHAPES) - 1),
    st.lists(st.sampled_from((0.5, 1.0, 2.0, 3.0)), min_size=4, max_size=4),
    st.lists(st.floats(0, 60), min_size=1, max_size=6).map(sorted),
    st.floats(20, 250),
)


@given(worlds)
def test_where_all_can_be_in_time_nobody_is_dropped(world: World) -> None:
    alone = play(*world, Never())
    if alone.count(Outcome.SERVED) == len(world[2]):
        assert play(*world, PredictiveDrop(proactive=True)).outcomes == alone.outcomes


@given(worlds)
def test_a_request_that_could_never_be_in_time_costs_nothing(
    world: World,
) -> None:
    """If it comes when nothing else is there, it is served exactly if it can be."""
    shape, times, _, slo_ms = world
    alone = play(shape, times, [0.0], slo_ms, Never())
    proactive = play(shape, times, [0.0], slo_ms, PredictiveDrop(proactive=True))
    assert proactive.count(Outcome.SERVED) == alone.count(Outcome.SERVED)
    assert proactive.wasted_ns == 0


def test_a_burst_costs_no_work_that_a_later_stage_throws_away() -> None:
    """Ten requests at once; the last of three stages is three times as slow, and the deadline lets it serve three."""
    world = 1, (1.0, 1.0, 3.0), [0.0] * 10, 122.0
    bound, proactive = (play(*world, PredictiveDrop(proactive=each)) for each in (False, True))
    assert (bound.count(Outcome.SERVED), proactive.count(Outcome.SERVED)) == (3, 3)
    assert bound.wasted_ns > 0
    assert proactive.wasted_ns == 0


def test_it_expects_what_batches_of_later_stages_take_on_average() -> None:
    """Six at once. If batches take half of what is believed, the second stage serves all of them in time."""
    world = 0, (1.0, 3.0), [0.0] * 6, 150.0
    served = [play(*world, PredictiveDrop(proactive=True), each).count(Outcome.SERVED) for each in (0.5, 1.0)]
    assert served == [6, 4]
