from sloop.app.scenario import TopologyTruth
from sloop.sim.truth.flows import Topology
from sloop.sim.truth.weights import Arrival, WeightPlaces
from sloop.units import FOREVER_NS, s
from sloop.vocabulary import ModelWeights, Node, ReplicaId, ReplicaSpec, Slot

NODES = [Node(name, "slow", 1.0, 1) for name in ("n0", "n1", "n2")]
LARGE, SMALL = ModelWeights("large", 300_000_000), ModelWeights("small", 100_000_000)
R = [ReplicaId(number) for number in range(6)]


def places() -> WeightPlaces:
    """A store whose link moves 100 MB a second. Variants a and b have the same weights."""
    keys = {("only", "a", "slow"): LARGE, ("other", "b", "slow"): LARGE, ("only", "c", "slow"): SMALL}
    return WeightPlaces(Topology(TopologyTruth(800.0), NODES), keys)


def spec(node: str = "n0", variant: str = "a", stage: str = "only") -> ReplicaSpec:
    return ReplicaSpec(stage, variant, Slot(1.0, "slow"), node)


def test_weights_are_fetched_once_for_a_node_and_stay_there() -> None:
    weights = places()
    assert not weights.fetch(0, R[0], spec())
    assert not weights.fetch(s(1), R[1], spec(variant="b", stage="other"))
    assert weights.due_ns == s(3), "one transfer at full rate"
    assert weights.arrived(s(3)) == [Arrival((R[0], R[1]))]
    assert weights.fetch(s(4), R[2], spec())
    assert not weights.fetch(s(4), R[3], spec(variant="c")), "another model"
    assert not weights.fetch(s(4), R[4], spec("n1")), "another node"


def test_transfers_share_the_link_from_the_store() -> None:
    weights = places()
    weights.fetch(0, R[0], spec())
    weights.fetch(0, R[1], spec("n1", "c"))
    assert weights.arrived(weights.due_ns) == [Arrival((R[1],))]
    assert weights.due_ns == s(4)


def test_the_last_that_leaves_ends_the_transfer_and_the_others_get_its_share() -> None:
    weights = places()
    weights.fetch(0, R[0], spec())
    weights.fetch(0, R[1], spec())
    weights.fetch(0, R[2], spec("n1"))
    assert not weights.leave(s(1), R[0])
    assert not weights.leave(s(1), R[5]), "it waits for nothing"
    assert weights.leave(s(2), R[1])
    assert weights.due_ns == s(4)
    assert not weights.fetch(s(2), R[3], spec()), "what had come is lost"
    assert weights.arrived(s(6)) == [Arrival((R[2],))]
    assert weights.arrived(weights.due_ns) == [Arrival((R[3],))]
    assert weights.due_ns == FOREVER_NS


def test_a_node_has_what_was_placed_until_it_is_lost() -> None:
    weights = places()
    weights.place("n0", LARGE)
    assert weights.fetch(0, R[0], spec())
    weights.lose(0, "n0")
    weights.lose(0, "n1")
    assert not weights.fetch(0, R[1], spec())
