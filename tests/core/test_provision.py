"""Starts that are ordered together with the transfers of their weights."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest

from sloop.actions import CancelTransfer, Decided, Evict, StartWorker, Transfer
from sloop.core.protocols import Provision
from sloop.core.provision import expected_starts_ns
from sloop.core.views import CompletionInput, Provisioning, ProvisionInput, ReplicaStart, StartCosts, WeightChain
from sloop.events import (
    NodeLost,
    NodeReady,
    TransferFailed,
    Transferred,
    Woke,
    WorkerLost,
    WorkerReady,
    WorkerStopped,
)
from sloop.policies.provision import AsPlaced, CheapestStart
from sloop.units import s
from sloop.vocabulary import STORE, ModelWeights, Node, ReplicaId, ReplicaSpec, Slot, TransferId
from tests.core.scene import Scene, plan_of, request

WEIGHTS = ModelWeights("a", 300)
NODES = tuple(Node(f"n{number}", "local", 2.0, 1000) for number in range(3))
NEAREST = CheapestStart()


@dataclass(frozen=True)
class Scripted(Provision):
    """Answers what the test has put in `answers`, and remembers what it was asked."""

    keeps: bool = True
    answers: list[Provisioning] = field(default_factory=list)
    seen: list[ProvisionInput] = field(default_factory=list)
    brings_weights: ClassVar[bool] = True
    partition: ClassVar[bool] = True
    chains: bool = False
    """Whether one chain brings all parts the other layers."""

    def provide(self, now_ns: int, given: ProvisionInput) -> Provisioning:
        self.seen.append(given)
        return self.answers.pop(0)

    def complete(self, now_ns: int, given: CompletionInput) -> list[tuple[str, tuple[str, ...]]]:
        return [(STORE, given.nodes)] if self.chains else [(STORE, (node,)) for node in given.nodes]


TWICE = (ReplicaStart(0, chain=0), ReplicaStart(0, chain=1))


def scene_of(replicas: int, provision: object = NEAREST, nodes: tuple[Node, ...] = NODES) -> Scene:
    made = Scene(plan_of(replicas), nodes=nodes, provision=provision)
    made.application.parts.starts["only", "a", ""] = StartCosts(WEIGHTS)  # type: ignore[index]
    return made


def starts(actions: object) -> list[tuple[str | None, int | None]]:
    return [(each.spec.node, each.transfer) for each in actions if isinstance(each, StartWorker)]  # type: ignore[attr-defined]


def cancelled(actions: object) -> list[tuple[int, str]]:
    return [(each.transfer, each.node) for each in actions if isinstance(each, CancelTransfer)]  # type: ignore[attr-defined]


def test_starts_wait_for_one_chain_and_are_ready_when_their_driver_says_so() -> None:
    scene = scene_of(4)
    actions = scene.act(0, Woke())
    chain = Transfer(TransferId(0), WEIGHTS, STORE, ("n0", "n1", "n2"))
    assert [each for each in actions if isinstance(each, Transfer)] == [chain]
    assert starts(actions) == [("n0", 0), ("n1", 0), ("n2", 0), ("n0", 0)]
    place = [type(each) for each in actions]
    assert place.index(Transfer) < place.index(StartWorker), "drivers know the transfer before those who wait for it"
    (why,) = [each.why for each in actions if isinstance(each, Decided) and each.kind == "provision"]
    assert why.startswith("4 replicas of a; the store sends them to n0 → n1 → n2; expected to serve in ")
    assert not scene.act(1, Transferred(TransferId(0), "n1"), WorkerReady(ReplicaId(1)))
    (started,) = [each for each in scene.act(2, request(0, at_ms=2)) if not isinstance(each, Decided)]
    assert started.replica == 1  # type: ignore[union-attr]


def test_later_starts_use_what_is_there_or_comes() -> None:
    scene = scene_of(1)
    scene.act(0, Woke())
    scene.script.target = plan_of(3)
    assert starts(scene.act(1_000, Woke())) == [("n0", 0), ("n1", 1)], "the second waits for the transfer under way"
    scene.act(1_500, Transferred(TransferId(0), "n0"), WorkerReady(ReplicaId(0)))
    scene.act(1_500, WorkerReady(ReplicaId(1)), Transferred(TransferId(1), "n1"), WorkerReady(ReplicaId(2)))
    scene.script.target = plan_of(5)
    actions = scene.act(2_000, Woke())
    assert starts(actions) == [("n1", None), ("n2", 2)]
    (sent,) = [each for each in actions if isinstance(each, Transfer)]
    assert (sent.source, sent.receivers) == ("n0", ("n2",))


def test_a_scaling_policy_that_asks_sees_how_long_a_start_takes_now() -> None:
    """300 bytes from the store take 1 s, and to load them 4 s."""
    planner = CheapestStart(link_mbps=0.0024, store_mbps=0.0024)
    scene, costs = scene_of(1, planner), StartCosts(WEIGHTS, load_s=4.0)
    scene.application.parts.starts["only", "a", ""] = costs  # type: ignore[index]
    (stage,), state = scene.application.all_stages, scene.core.state

    def expected_s(now_s: float) -> float:
        return expected_starts_ns(s(now_s), state, stage)["a", ""] / 1e9

    assert expected_s(0) == pytest.approx(5.0), "from the store"
    scene.act(0, Woke())
    assert expected_s(0.4) == pytest.approx(4.6), "with the transfer under way"
    scene.act(1_000, Transferred(TransferId(0), "n0"))
    assert expected_s(1.5) == pytest.approx(4.0), "from the files of the node"
    for policy in (Scripted(), AsPlaced()):
        stage.application.policies = replace(stage.application.policies, provision=policy)
        assert not expected_starts_ns(0, state, stage), "they do not say"


def test_only_a_scaling_policy_that_asks_is_told() -> None:
    made = scene_of(1, CheapestStart())
    made.act(0, Woke())
    assert not made.script.seen[-1].stages[0].starts_ns


def test_a_failed_transfer_replaces_the_starts_that_wait_for_it() -> None:
    """Flashpoint specification, number 23: if nobody has the weights any more, they come from the store."""
    scene = scene_of(1)
    scene.act(0, Woke())
    scene.act(1, Transferred(TransferId(0), "n0"), WorkerReady(ReplicaId(0)))
    scene.script.target = plan_of(3)
    actions = scene.act(1_000, Woke())
    assert starts(actions) == [("n0", None), ("n1", 1)]
    scene.act(1_000, WorkerReady(ReplicaId(1)))
    scene.act(1_100, request(7, at_ms=1_100))
    scene.act(1_100, NodeLost("n0", "it went down"))
    assert not scene.act(1_100, TransferFailed(TransferId(1), "n1", "n0 is gone"))
    actions = scene.act(1_100, WorkerLost(ReplicaId(2), "its weights do not come"))
    (why,) = [each.why for each in actions if isinstance(each, Decided) and each.kind == "lost"]
    assert why == "its weights do not come; a replacement starts at once"
    (again,) = [each for each in actions if isinstance(each, Transfer)]
    assert (again.source, again.receivers) == (STORE, ("n2",)), "n1 is avoided, where a start has failed"
    assert starts(actions) == [("n2", 2)]
    assert not scene.act(1_101, TransferFailed(TransferId(1), "n1", "again")), "said twice"
    scene.act(1_200, WorkerLost(ReplicaId(0), "n0"), WorkerLost(ReplicaId(1), "n0"))
    scene.act(1_400, Transferred(TransferId(2), "n2"))
    ended = scene.act(1_400, WorkerReady(ReplicaId(3)))
    assert any(getattr(each, "requests", ()) == (7,) for each in ended), "the request was not lost"


def test_a_transfer_is_cancelled_with_the_last_start_that_waits_for_it() -> None:
    other = Scripted(keeps=False)
    scene = scene_of(3, other)
    twice = (ReplicaStart(0, chain=0), ReplicaStart(0, chain=0), ReplicaStart(1, chain=0))
    other.answers.append(Provisioning(twice, (WeightChain(STORE, ("n0", "n1", "n2")),)))
    other.answers.extend([Provisioning(())] * 9)
    actions = scene.act(0, Woke())
    assert cancelled(actions) == [(0, "n2")], "no start waits there"
    assert not cancelled(scene.act(1, WorkerStopped(ReplicaId(0)))), "another one waits"
    assert cancelled(scene.act(2, WorkerLost(ReplicaId(1), "it crashed"))) == [(0, "n0")]
    assert scene.core.state.weights.transfers[TransferId(0)].receivers.keys() == {"n1"}
    assert not scene.act(3, Transferred(TransferId(0), "n0")), "its report was under way"
    scene.act(4, Transferred(TransferId(0), "n1"))
    assert not cancelled(scene.act(5, WorkerLost(ReplicaId(2), "it crashed"))), "it has come"
    assert not scene.core.state.weights.by_node, "what is not kept is gone"


def test_what_nodes_keep_comes_although_the_start_is_given_up() -> None:
    scene = scene_of(1)
    scene.act(0, Woke())
    scene.script.target = plan_of(0)
    scene.act(1_000, Woke())
    assert not cancelled(scene.act(1_001, WorkerStopped(ReplicaId(0))))
    assert scene.core.state.weights.transfers, "the next start on this node needs it"


def test_of_several_transfers_of_the_same_files_to_a_node_only_the_last_one_comes_without_a_start() -> None:
    """A policy may give each start a transfer of its own. They would share the links with the starts that are left."""
    faas = Scripted(answers=[Provisioning(TWICE, (WeightChain(STORE, ("n0",)),) * 2)])
    one = (Node("n0", "local", 2.0, 2000),)
    scene = scene_of(2, faas, one)
    assert starts(scene.act(0, Woke())) == [("n0", 0), ("n0", 1)]
    scene.script.target = plan_of(0)
    scene.act(1_000, Woke())
    assert cancelled(scene.act(1_001, WorkerStopped(ReplicaId(0)))) == [(0, "n0")]
    assert not cancelled(scene.act(1_002, WorkerStopped(ReplicaId(1)))), "the next start on this node needs it"
    assert list(scene.core.state.weights.transfers) == [1]


def test_no_transfer_is_ordered_again_for_a_start_without_room() -> None:
    """The second start has a core and memory for its weights, but not for itself."""
    faas = Scripted(answers=[Provisioning(TWICE, (WeightChain(STORE, ("n0",)),) * 2)])
    actions = (scene := scene_of(2, faas, (Node("n0", "local", 2.0, 750),))).act(0, Woke())
    assert starts(actions) == [("n0", 0)]
    assert [each.transfer for each in actions if isinstance(each, Transfer)] == [0]
    assert list(scene.core.state.weights.transfers) == [0]


def test_a_start_without_room_for_its_weights_is_missing() -> None:
    small = tuple(Node(f"n{number}", "local", 2.0, 100 + 300 * (number == 0)) for number in range(2))
    scene = scene_of(3, nodes=small)
    assert starts(scene.act(0, Woke())) == [("n0", 0)], "100 of memory each, and 300 for the weights"
    (why,) = [each.why for each in scene.actions if isinstance(each, Decided) and each.kind == "shortage"]
    assert why == "no node has room for a replica of a with 1 core and 3e-07 GB for its weights"


def test_memory_of_weights_that_nobody_uses_gives_way() -> None:
    scene = scene_of(1, nodes=NODES[:1])
    scene.act(0, Woke())
    scene.act(1, Transferred(TransferId(0), "n0"), WorkerReady(ReplicaId(0)))
    scene.script.target = plan_of(0)
    scene.act(1_000, Woke())
    scene.act(1_001, WorkerStopped(ReplicaId(0)))
    free = scene.core.state.ledger.free_memory_bytes("n0")
    assert free == 1000, "the files are there, and free for others"
    other = Scripted(answers=[Provisioning((ReplicaStart(0, chain=0),), (WeightChain(STORE, ("n0",)),))])
    object.__setattr__(scene.application.parts.policies, "provision", other)
    scene.application.parts.starts["only", "b", ""] = StartCosts(ModelWeights("b", 800))  # type: ignore[index]
    scene.script.target = plan_of(1, variant="b")
    actions = scene.act(2_000, Woke())
    assert [each.weights.name for each in actions if isinstance(each, Evict)] == ["a"]
    place = [type(each) for each in actions]
    assert place.index(Evict) < place.index(Transfer)


def test_a_policy_sees_the_stage_and_what_is_under_way() -> None:
    other = Scripted()
    scene = scene_of(1, other)
    other.answers.append(Provisioning((ReplicaStart(0, chain=0),), (WeightChain(STORE, ("n0", "n1")),)))
    scene.act(0, Woke())
    (seen,) = other.seen
    assert (seen.stage, seen.count, len(seen.sites), seen.weights) == ("only", 1, 3, ())
    assert seen.spec == ReplicaSpec("only", "a", Slot(1.0))
    scene.act(1, Transferred(TransferId(0), "n0"), WorkerReady(ReplicaId(0)))
    scene.act(1_500, *(request(number, at_ms=1_500) for number in range(6)))
    scene.script.target = plan_of(2)
    other.answers.append(Provisioning(()))
    scene.act(s(2) / 1e6, Woke())
    seen = other.seen[-1]
    assert [(view.node, view.has_files, view.arriving) for view in seen.weights] == [
        ("n0", True, None),
        ("n1", False, 0),
    ]
    assert seen.sends == {STORE: 1, "n0": 1}, "the node as a link of the chain"
    assert (seen.arrivals_rps, seen.waiting) == (3.0, 5)
    assert round(seen.served_rps) == round(4000 / 14)


def test_a_new_core_counts_on_the_files_that_nodes_say_they_have() -> None:
    scene = scene_of(3, NEAREST, NODES[:2])
    other = ModelWeights("of nobody", 300)
    actions = scene.act(0, NodeReady(NODES[1], (), (other, WEIGHTS)), Woke())
    (sent,) = [each for each in actions if isinstance(each, Transfer)]
    assert (sent.source, sent.receivers) == ("n1", ("n0",))
    assert starts(actions) == [("n1", None), ("n1", None), ("n0", 0)]


def test_files_for_which_a_node_has_no_memory_are_not_counted_on() -> None:
    small = (Node("n0", "local", 2.0, 250), NODES[1])
    scene = scene_of(1, NEAREST, small)
    actions = scene.act(0, NodeReady(small[0], (), (WEIGHTS,)), Woke())
    assert starts(actions) == [("n1", 0)]
    assert next(each.source for each in actions if isinstance(each, Transfer)) == STORE


def test_a_core_without_such_a_policy_takes_no_note_of_files() -> None:
    scene = scene_of(0, Scripted(keeps=False))
    scene.act(0, NodeReady(NODES[1], (), (WEIGHTS,)), Woke())
    assert not scene.core.state.weights.by_node


def test_nodes_that_send_or_receive_are_not_released() -> None:
    rented = (Node("n0", "local", 2.0, 1000), Node("n1", "local", 2.0, 1000, on_demand=True))
    other = Scripted()
    scene = scene_of(3, other, rented)
    other.answers.append(Provisioning(()))
    other.answers.append(Provisioning((), (WeightChain(STORE, ("n1",)),)))
    scene.act(0, Woke())
    scene.act(1, NodeReady(rented[1]))
    assert not scene.core.state.ledger.is_empty("n1")
    scene.act(2, Transferred(TransferId(0), "n1"))
    assert scene.core.state.ledger.is_empty("n1")
