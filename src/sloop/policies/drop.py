"""Drop: which waiting visits to drop. Each class is one policy; none uses another."""

from dataclasses import dataclass
from typing import Literal

from sloop.core.protocols import Drop
from sloop.options import PositiveFloat
from sloop.vocabulary import Visit


@dataclass(frozen=True, slots=True)
class Never(Drop):
    """Drop nothing: every admitted request is executed.

    Fails under overload: the queue grows without bound until every answer is late.
    """

    def is_hopeless(self, now_ns: int, visit: Visit, cost_ns: int, full_ns: int = 0) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Age(Drop):
    """Drop a visit whose request is older than `limit` times its SLO, or its path's SLO.

    Biscale found 1× better than 3× and than no dropping; Sponge's artefact has 1× and 3×. Age counts from when the
    client began to send. Fails under overload at 1×: a visit just below the limit is executed although its answer must
    be late (see `PredictiveDrop`).
    """

    limit: PositiveFloat = 1.0
    """Times the SLO."""

    def is_hopeless(self, now_ns: int, visit: Visit, cost_ns: int, full_ns: int = 0) -> bool:
        sent_ns = visit.request.sent_ns
        return now_ns - sent_ns > self.limit * (visit.deadline_ns - sent_ns)


@dataclass(frozen=True, slots=True)
class PredictiveDrop(Drop):
    """Drop a visit that would be late even if it started now and found only idle replicas.

    A visit is hopeless if now + cost > deadline. The cost includes all later stages: in batches of one (`alone`), its
    lower bound, or in the plan's full batches (`full`), as in Biscale's rule. Fails if the believed cost is too high:
    it drops visits that would have been in time. A lower bound fails in graphs under overload: the first stage serves
    each visit so late that it can only just be in time, and a later stage drops it as soon as anything waits there.
    With `proactive` the first stage drops it, before it computes anything for it, as in PARD (arXiv 2602.08747).
    """

    batch: Literal["alone", "full"] = "alone"
    """The cost to expect of all stages: in batches of one (`alone`), or in the plan's `full` batches."""
    proactive: bool = False
    """Whether the cost of later stages is the time expected now, with batches as large as those that run there, and
    after what waits there (`core.graph_estimates.expected_times`), instead of a lower bound."""
    strict: bool = False
    """Whether to drop all that waits at a stage that has run nothing for seconds, too. Otherwise one visit is served: a
    cost that is believed too high would stop the stage for ever, because nothing would run that shows it."""

    def is_hopeless(self, now_ns: int, visit: Visit, cost_ns: int, full_ns: int = 0) -> bool:
        return now_ns + (cost_ns if self.batch == "alone" else full_ns) > visit.deadline_ns
