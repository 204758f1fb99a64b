"""The fewest batches per core."""

from sloop.policies.route.least_loaded import LeastLoaded
from sloop.vocabulary import ReplicaId


class Sent:
    def __init__(self, number: int, cores: float, batches: int) -> None:
        self.id, self.cores, self.batches = ReplicaId(number), cores, batches


def test_counts_batches_per_core_and_breaks_ties_by_id() -> None:
    assert LeastLoaded().choose(0, [Sent(1, 1, 6), Sent(2, 4, 20), Sent(3, 1, 5)], ReplicaId(-1)) == 1
