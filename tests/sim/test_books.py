from sloop.app.application import Application, Stage, SystemChoice, Variant
from sloop.app.graph import Each
from sloop.sim.books import Books, Rooms, TrackedReplica
from sloop.vocabulary import BatchId, Node, ReplicaId, ReplicaSpec, Request, RequestId

DIAMOND = Application(
    "diamond",
    100.0,
    (
        Stage("a", (Variant("v"),)),
        Stage("b", (Variant("v"),), ("a",)),
        Stage("c", (Variant("v"),), ("a",)),
        Stage("d", (Variant("v"),), ("b", "c")),
    ),
    SystemChoice("static"),
)
R0 = RequestId(0)


def run(books: Books, stage: str, batch: int) -> bool:
    """Request 0 passes a stage; whether it has passed all."""
    books.start(ReplicaId(batch), ReplicaSpec(stage, "v", 1.0, "n"))
    replica = books.replicas[ReplicaId(batch)]
    entry = books.requests[R0]
    replica.batch, replica.visits = BatchId(batch), [(entry, (stage, 0), entry.waiting.pop((stage, 0))[1])]
    return bool(books.pass_on(replica, ()))


def test_a_request_enters_a_stage_when_all_before_it_are_done() -> None:
    books = Books(DIAMOND)
    books.arrive(Request(R0, 0, 0, 100))
    assert not run(books, "a", 1)
    assert sorted(books.requests[R0].waiting) == [("b", 0), ("c", 0)]
    assert not run(books, "c", 2)
    assert sorted(books.requests[R0].waiting) == [("b", 0)]
    assert not run(books, "b", 3)
    assert sorted(books.requests[R0].waiting) == [("d", 0)]
    assert run(books, "d", 4)


def test_a_lost_replica_puts_its_batch_back() -> None:
    books = Books(DIAMOND)
    books.arrive(Request(R0, 0, 0, 100))
    books.start(ReplicaId(0), ReplicaSpec("a", "v", 1.0, "n"))
    replica = books.replicas[ReplicaId(0)]
    entry = books.requests[R0]
    replica.batch, replica.visits = BatchId(1), [(entry, ("a", 0), entry.waiting.pop(("a", 0))[1])]
    books.step = 5
    books.forget(ReplicaId(0))
    assert books.requests[R0].waiting == {("a", 0): (5, 100)}
    assert not books.replicas
    assert not books.by_node["n"]


def test_the_earliest_deadline_is_that_of_whoever_still_waits() -> None:
    books = Books(DIAMOND)
    for step, (id, deadline_ns) in enumerate([(0, 50), (1, 20), (2, 30), (3, 10)]):
        books.step = step
        books.arrive(Request(RequestId(id), 0, 0, deadline_ns))
    waiting = books.waiting["a"]
    assert waiting.earliest_ns(books.requests, 4) == 10
    assert waiting.earliest_ns(books.requests, 3) == 20, "request 3 came in this very step"
    del books.requests[RequestId(1)]
    assert waiting.earliest_ns(books.requests, 3) == 30
    books.requests.clear()
    assert waiting.earliest_ns(books.requests, 9) is None


def replica(cores: float = 1.0, device: str = "", share: float = 1.0) -> TrackedReplica:
    return TrackedReplica(ReplicaSpec("a", "v", cores, "n", device, share))


def test_rooms_say_what_does_not_fit() -> None:
    rooms = Rooms([Node("n", "custom", 4.0, 100, devices=("gpu0",))], {("a", "v"): 30})
    assert rooms.complaint("n", [replica(2.0), replica(2.0)]) == ""
    assert rooms.complaint("n", [replica(2.0), replica(2.5)]) == "n has 4 cores and gives out 4.5"
    assert rooms.complaint("n", [replica()] * 4) == "n has 100 bytes and gives out 120"
    assert rooms.complaint("n", [replica(0.5, "gpu0", 0.6)]) == ""
    assert rooms.complaint("n", [replica(0.5, "gpu0", 0.6)] * 2) == "n gives out 1.2 of device gpu0"
    assert rooms.complaint("n", [replica(0.5, "gpu1", 0.1)]) == "n gives out 0.1 of device gpu1"
    assert rooms.complaint("moon", []) == "there is no node 'moon'"


def test_a_resize_under_way_holds_the_larger_room() -> None:
    growing = replica(1.0)
    growing.wanted_cores = 5.0
    assert Rooms([Node("n", "custom", 4.0, 100)], {}).complaint("n", [growing]) == "n has 4 cores and gives out 5"


PARTS = Application(
    "parts",
    100.0,
    (
        Stage("a", (Variant("v"),)),
        Stage("b", (Variant("v"),), ("a",), each=Each("a")),
        Stage("c", (Variant("v"),), ("a", "b"), join=True),
    ),
    SystemChoice("static"),
)


def run_parts(books: Books, id: int, stage: str, parts: tuple[int, ...], *ways: tuple[int, ...]) -> bool:
    """These parts of request 0 pass a stage together; whether it has passed all."""
    books.start(ReplicaId(id), ReplicaSpec(stage, "v", 1.0, "n"))
    replica, entry = books.replicas[ReplicaId(id)], books.requests[R0]
    replica.batch = BatchId(id)
    replica.visits = [(entry, (stage, part), entry.waiting.pop((stage, part))[1]) for part in parts]
    return bool(books.pass_on(replica, ways))


def test_parts_wait_and_run_each_by_itself() -> None:
    books = Books(PARTS)
    books.arrive(Request(R0, 0, 0, 100))
    assert not run_parts(books, 1, "a", (0,), (3, 1))
    assert sorted(books.requests[R0].waiting) == [("b", 0), ("b", 1), ("b", 2)]
    assert not run_parts(books, 2, "b", (0, 2))
    assert sorted(books.requests[R0].waiting) == [("b", 1)]
    assert not run_parts(books, 3, "b", (1,))
    assert sorted(books.requests[R0].waiting) == [("c", 0)]
    assert run_parts(books, 4, "c", (0,))
    assert books.requests[R0].is_through


def test_a_request_that_sends_nothing_on_is_through() -> None:
    books = Books(PARTS)
    books.arrive(Request(R0, 0, 0, 100))
    assert run_parts(books, 1, "a", (0,), (0, 0))


def test_parts_of_a_lost_replica_wait_again_as_what_they_were() -> None:
    books = Books(PARTS)
    books.arrive(Request(R0, 0, 0, 100))
    run_parts(books, 1, "a", (0,), (2, 1))
    books.start(ReplicaId(2), ReplicaSpec("b", "v", 1.0, "n"))
    replica, entry = books.replicas[ReplicaId(2)], books.requests[R0]
    replica.batch = BatchId(2)
    replica.visits = [(entry, ("b", part), entry.waiting.pop(("b", part))[1]) for part in (1, 0)]
    books.forget(ReplicaId(2))
    assert sorted(entry.waiting) == [("b", 0), ("b", 1)]
    assert not replica.visits
