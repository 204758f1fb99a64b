"""Drop: which waiting visits to give up. Each class is one policy; none uses another."""

from dataclasses import dataclass
from typing import Literal

from sloop.options import check_range
from sloop.vocabulary import Visit


@dataclass(frozen=True, slots=True)
class Never:
    """Give nothing up: every admitted request is executed.

    Fails under overload: the queue grows without bound and in the end every answer is late.
    """

    def is_hopeless(self, now_ns: int, visit: Visit, cost_ns: int, full_ns: int = 0) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Age:
    """Give up a visit whose request is older than `limit` times its SLO, or that of its path.

    Biscale found 1× better than 3× and than never; Sponge's artefact has 1× and 3×. Age counts from when the client
    began to send. Fails under overload at 1×: a visit just young enough is executed although it can only be late (see
    `PredictiveDrop`).
    """

    limit: float = 1.0

    def __post_init__(self) -> None:
        check_range("limit", self.limit, above=0)

    def is_hopeless(self, now_ns: int, visit: Visit, cost_ns: int, full_ns: int = 0) -> bool:
        sent_ns = visit.request.sent_ns
        return now_ns - sent_ns > self.limit * (visit.deadline_ns - sent_ns)


@dataclass(frozen=True, slots=True)
class PredictiveDrop:
    """Give up a visit that would be late even if it started now and met only idle replicas.

    Hopeless when now + `trust` × cost > deadline. The cost is that of the visit and of every later stage: in batches of
    one (`alone`), the least it can be, or in the plan's full batches (`full`), as in Biscale's rule. Fails where the
    believed cost is too high: visits are given up that would have been in time; `trust` below 1 allows for that.
    """

    trust: float = 1.0
    batch: Literal["alone", "full"] = "alone"

    def __post_init__(self) -> None:
        check_range("trust", self.trust, least=0)

    def is_hopeless(self, now_ns: int, visit: Visit, cost_ns: int, full_ns: int = 0) -> bool:
        left_ns = visit.deadline_ns - now_ns
        return self.trust * (cost_ns if self.batch == "alone" else full_ns) > left_ns
