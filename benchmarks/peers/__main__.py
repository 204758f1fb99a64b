"""sloop beside what users would pick instead: mosec, LitServe, BentoML, Ray Serve, Triton, MLServer.

    python -m benchmarks.peers [--quick] [--only mosec,sloop] [--parts closed,open,bytes] [--repeat 3]

Each server runs in an environment of its own (`.peers/`, made where it is missing), serves the same ONNX file on one
thread, and is proven to give the bare runtime's answer before it is measured.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from benchmarks.notebook import arguments, publish, workspace
from benchmarks.peers import closed
from benchmarks.peers.load import client
from benchmarks.peers.models import mlp, pool
from benchmarks.peers.peer import Encoding, Peer
from benchmarks.peers.servers import PEERS

FIRST: Final = "sloop"


def chosen(only: str) -> list[Peer]:
    """The peers whose names or environments are among those given; all of none."""
    wanted = {name.strip().lower() for name in only.split(",") if name.strip()}
    unknown = wanted - {name for peer in PEERS for name in names_of(peer)}
    if unknown:
        raise SystemExit(f"no peer {', '.join(sorted(unknown))}; known: {', '.join(p.environment.name for p in PEERS)}")
    return [peer for peer in PEERS if not wanted or wanted & names_of(peer)]


def names_of(peer: Peer) -> set[str]:
    return {peer.name.lower(), peer.environment.name}


def closed_loop(folder: Path, peers: list[Peer], given: Namespace) -> None:
    plan = closed.Plan(
        model=mlp(folder),
        encodings=(Encoding.JSON, Encoding.BINARY),
        connections=(1, 64) if given.quick else (1, 8, 64, 256),
        batch_max=64,
        seconds=2.0 if given.quick else 4.0,
        rounds=given.repeat,
        seed=given.seed,
        folder=folder,
    )
    found = closed.compare(plan, peers)
    text = "\n\n".join(
        [
            f"A small model (16 → 64 → 8), a closed loop by {client()}, {plan.seconds:g} s each after "
            f"{closed.WARM_S:g} s of warming up; batches of up to {plan.batch_max}, one worker with one thread. JSON "
            "unless it says binary. CPU is that of the server's whole process tree, memory the sum of its processes' "
            "proportional shares (PSS) at the end of a run, the largest of them.",
            closed.settings(peers),
            closed.tables(found, plan, FIRST),
            closed.orders(found, plan),
        ]
    )
    figure = closed.bars(found, plan, name="throughput", title="A small model, closed loop")
    title = "Small requests, beside other servers"
    publish("peers-closed", title, text, [figure], write=not given.no_write)


def bytes_moved(folder: Path, peers: list[Peer], given: Namespace) -> None:
    plan = closed.Plan(
        model=pool(folder),
        encodings=(Encoding.BINARY,),
        connections=(1, 8),
        batch_max=8,
        seconds=2.0 if given.quick else 4.0,
        rounds=given.repeat,
        seed=given.seed,
        folder=folder,
    )
    found = closed.compare(plan, peers)
    text = "\n\n".join(
        [
            "A tensor of 3 × 224 × 224 FP32 (602,112 bytes) of which the model takes each colour's mean, so that what "
            f"is left is moving it: a closed loop by {client()}, {plan.seconds:g} s each; batches of up to "
            f"{plan.batch_max}.",
            closed.settings(peers),
            closed.tables(found, plan, f"{FIRST}, binary"),
            closed.orders(found, plan),
        ]
    )
    figure = closed.bars(found, plan, name="throughput", title="600 kB requests, closed loop")
    publish("peers-bytes", "Moving 600 kB, beside other servers", text, [figure], write=not given.no_write)


PARTS: Final[Mapping[str, Callable[[Path, list[Peer], Namespace], None]]] = {
    "closed": closed_loop,
    "bytes": bytes_moved,
}


def parser() -> ArgumentParser:
    made = arguments(__doc__)
    made.add_argument("--quick", action="store_true", help="a short look: fewer loads, shorter runs")
    made.add_argument("--only", default="", metavar="NAMES", help="these peers, by name, with commas between")
    made.add_argument("--parts", default=",".join(PARTS), metavar="NAMES", help=f"of {', '.join(PARTS)} (default all)")
    made.add_argument("--repeat", type=int, default=1, metavar="N", help="rounds, to see whether the order stays")
    return made


def main() -> None:
    given = parser().parse_args()
    parts = given.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        raise SystemExit(f"no part {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    peers = chosen(given.only)
    with workspace(given.keep) as folder:
        for part in parts:
            PARTS[part](folder.absolute(), peers, given)


if __name__ == "__main__":
    main()
