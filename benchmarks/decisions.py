"""How long a decision takes, system by system, on published profiles (Sponge specification, check 13).

    python -m benchmarks.decisions [--rounds 200]

A core is filled with a second of requests and then asked for plans; the plan's own time is taken, and the time for one
batch decision on a long queue.
"""

import time
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from benchmarks.notebook import arguments, publish, table
from sloop.core.views import Bucket, ClusterView, NodeView, ReplicaView, StageView, Traffic
from sloop.policies.batch.deadline import Deadline
from sloop.policies.build import build
from sloop.profile.estimate import Estimate
from sloop.profile.published import YOLOV5S_S
from sloop.units import NS_PER_S, ms, s
from sloop.vocabulary import Life, Node, Path, ReplicaId, ReplicaSpec, Request, RequestId, Visit

BELIEF = Estimate(YOLOV5S_S)


class Timed(NamedTuple):
    """Milliseconds of a decision: median, 99th percentile, and what the latter may be at most."""

    p50_ms: float
    p99_ms: float
    target_ms: float | None
    is_kept: bool | None


def view_of(count: int, slack_ms: float, random: Random, seconds: int = 60) -> ClusterView:
    """A stage of four replicas that got `count` requests in each of the last seconds, and has as many waiting."""
    slack_ns = [[ms(slack_ms * random.uniform(0.9, 1.0)) for _ in range(count)] for _ in range(seconds)]
    buckets = [
        Bucket(s(at), count, NS_PER_S, NS_PER_S, 3 * NS_PER_S, 4 * NS_PER_S, own) for at, own in enumerate(slack_ns)
    ]
    queue = [
        Visit(
            Request(RequestId(n), s(seconds - 1), s(seconds - 1), s(seconds) + left),
            "m",
            s(seconds - 1),
            s(seconds) + left,
        )
        for n, left in enumerate(sorted(slack_ns[0]))
    ]
    replicas = tuple(ReplicaView(ReplicaId(n), ReplicaSpec("m", "v", 1.0, "n"), Life.READY, 0, 0) for n in range(4))
    stage = StageView(
        name="m",
        slo_ns=s(1),
        after=(),
        variants={"v": BELIEF},
        replicas=replicas,
        queue=tuple(queue),
        running=0,
        buckets=buckets,
        bucket_ns=s(1),
    )
    node, rps = NodeView(Node("n", "local", 64, 1 << 30), 64, 1 << 30, {}), float(count)
    door = Traffic(buckets=buckets, bucket_ns=s(1))
    return ClusterView((stage,), (node,), None, {"m": rps}, door, rps, (Path(("m",), s(1)),))


def timed(decide: Callable[[], object], rounds: int, target_ms: float | None = None) -> Timed:
    """Time `rounds` calls, after as many to warm up."""
    taken_ms = []
    for _ in range(2 * rounds):
        begun = time.perf_counter()
        decide()
        taken_ms.append((time.perf_counter() - begun) * 1e3)
    ordered = sorted(taken_ms[rounds:])
    p99_ms = ordered[99 * rounds // 100]
    return Timed(ordered[rounds // 2], p99_ms, target_ms, None if target_ms is None else p99_ms <= target_ms)


def scale(name: str, view: ClusterView, rounds: int, target_ms: float | None = None, **parameters: object) -> Timed:
    policy = build("scale", name, parameters)
    return timed(lambda: policy.plan(s(60), view), rounds, target_ms)  # type: ignore[attr-defined]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    given = parser.parse_args()
    rounds, random = given.rounds, Random(given.seed)
    calm, fade, many = view_of(20, 950, random), view_of(20, 500, random), view_of(200, 950, random)
    costs_ns = [0, *(ms(8 + size) for size in range(1, 33))]
    tight = [
        Visit(Request(RequestId(n), 0, 0, deadline_ns), "m", 0, deadline_ns)
        for n, deadline_ns in enumerate(sorted(ms(random.uniform(10, 60)) for _ in range(10_000)))
    ]
    found = {
        "sponge, 16 × 16": scale("sponge", calm, rounds, 5),
        "sponge, 16 × 16, nothing holds": scale("sponge", fade, rounds, 5),
        "sponge, budgets by batch, 200 requests": scale("sponge", many, rounds, 20, budget="per_batch"),
        "fa2_single": scale("fa2_single", calm, rounds, 20),
        "hpa": scale("hpa", calm, rounds),
        "kpa": scale("kpa", calm, rounds),
        "vpa": scale("vpa", calm, rounds),
        "static": scale("static", calm, rounds),
        "batch deadline, 10,000 wait, hardly any in time": timed(
            lambda: Deadline().decide(0, tight, 32, costs_ns), rounds
        ),
        "batch deadline, enough time": timed(lambda: Deadline().decide(0, tight[-20:], 16, costs_ns), rounds),
    }
    rows = [(what, *took) for what, took in found.items()]
    text = f"Each decision {rounds} times after as many to warm up, on the profile YOLOv5s-S.\n\n"
    text += table(("decision", "p50 ms", "p99 ms", "at most, ms", "kept"), rows)
    publish("decisions", "How long a decision takes", text, write=not given.no_write)


if __name__ == "__main__":
    main()
