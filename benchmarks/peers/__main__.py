"""sloop compared with other inference servers: mosec, LitServe, BentoML, Ray Serve, Triton, MLServer.

    python -m benchmarks.peers [--quick] [--only mosec,sloop] [--parts closed,open,bytes] [--repeat 3]

Each server runs in its own environment (`.peers/`, created when needed) and serves the same ONNX file on one thread.
It is measured only if it answers like ONNX Runtime itself.
"""

import signal
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.notebook import arguments, publish, say, workspace
from benchmarks.peers import closed, open_loop, outcomes
from benchmarks.peers.bare import limit_of
from benchmarks.peers.load import TIMEOUT_S, client
from benchmarks.peers.models import image_model, mlp, pool
from benchmarks.peers.peer import Encoding, Peer
from benchmarks.peers.servers import OPEN_PEERS, PEERS
from sloop.report.plots import Figure

FIRST: Final = "sloop"
LOADS: Final = (0.5, 0.8, 0.9, 1.0, 1.3, 1.5)
QUICK_LOADS: Final = (0.8, 1.3)
BARE_S: Final = 2.0
IMAGE_BATCH_MAX: Final = 8
IMAGES: Final = (
    ("squeezenet", "SqueezeNet", 128, 150.0, (0.8, 1.0, 1.3), (open_loop.SQUARE, open_loop.STEADY)),
    ("resnet50", "ResNet-50", 96, 250.0, (0.9, 1.3), (open_loop.SQUARE,)),
)
"""Model, its title, pixels, deadline in ms, the loads at which limits are swept, and the waves."""
CLOSED_ABOUT: Final = """\
A small model (16 → 64 → 8), a closed loop. JSON unless it says binary: sloop, Triton and MLServer read and write the
Open Inference Protocol, the others a bare `{"x": [...]}`, which is shorter. CPU is that of the server's whole process
tree, memory the sum of its processes' proportional shares (PSS) at the end of a run, the largest of them. Each server
runs with each of its settings, and the one with the most answers counts in each table."""
OPEN_ABOUT: Final = f"""\
Real architectures on images small enough for two cores, an open loop: the arrival instants are the same for every
server, requests go out when due and carry the tensor as each server takes bytes best. One worker with one thread each.
Load is set against a loop around the bare runtime on one thread. The limit is a server of that speed that costs
nothing, with nothing beside it, that refuses at once what it could not answer in time. The square wave has
{open_loop.BURST:g} and {2 - open_loop.BURST:g} times its mean in turn, {open_loop.PERIOD_S / 2:g} s each. A request
without an answer after {TIMEOUT_S:g} s has failed. Each peer's admission limit was swept and its best setting for each
load taken (none at all, the default of most, ends as LitServe does); LitServe and MLServer have none to be set; sloop's
is what it decides from the deadline and its profile."""


def chosen(only: str, peers: Sequence[Peer]) -> list[Peer]:
    """The peers whose names or environments are in `names`; all peers if it is empty."""
    wanted = {name.strip().lower() for name in only.split(",") if name.strip()}
    unknown = wanted - {name for peer in peers for name in names_of(peer)}
    if unknown:
        raise SystemExit(f"no peer {', '.join(sorted(unknown))}; known: {', '.join(p.environment.name for p in peers)}")
    return [peer for peer in peers if not wanted or wanted & names_of(peer)]


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
            CLOSED_ABOUT,
            f"By {client()}, {plan.seconds:g} s each after {closed.WARM_S:g} s of warming up; batches of up to "
            f"{plan.batch_max}, one worker with one thread.",
            closed.settings(peers),
            closed.tables(found, plan, FIRST),
            closed.sweep(found, plan),
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
            closed.sweep(found, plan),
            closed.orders(found, plan),
        ]
    )
    figure = closed.bars(found, plan, name="throughput", title="600 kB requests, closed loop")
    publish("peers-bytes", "Moving 600 kB, beside other servers", text, [figure], write=not given.no_write)


def open_loops(folder: Path, peers: list[Peer], given: Namespace) -> None:
    texts: list[str] = []
    figures: list[Figure] = []
    for name, title, pixels, slo_ms, swept, waves in IMAGES[: 1 if given.quick else None]:
        model = image_model(folder, name, pixels)
        bare = limit_of(model, IMAGE_BATCH_MAX, 0.5 if given.quick else BARE_S)
        say(f"{title}: the bare runtime does {bare.rps:.1f} images/s in batches of {bare.batch}")
        plan = open_loop.Plan(
            model=model,
            title=f"{title}, {pixels} × {pixels} pixels",
            bare=bare,
            slo_ms=slo_ms,
            batch_max=IMAGE_BATCH_MAX,
            loads=QUICK_LOADS if given.quick else LOADS,
            swept=QUICK_LOADS if given.quick else swept,
            waves=waves[:1] if given.quick else waves,
            seconds=2.5 if given.quick else 5.0,
            rounds=given.repeat,
            seed=given.seed,
            folder=folder,
        )
        found = open_loop.compare(plan, peers)
        texts += [outcomes.report(plan, found), outcomes.orders(plan, found)]
        figures.append(outcomes.curves(plan, found))
    text = "\n\n".join([OPEN_ABOUT, closed.settings(peers), *filter(None, texts)])
    name = f"peers-open-{given.name}" if given.name else "peers-open"
    again = f" ({given.name})" if given.name else ""
    title = f"Deadlines under bursts, beside other servers{again}"
    publish(name, title, text, figures, write=not given.no_write)


Part = Callable[[Path, list[Peer], Namespace], None]
PARTS: Final[Mapping[str, tuple[Part, Sequence[Peer]]]] = {
    "closed": (closed_loop, PEERS),
    "open": (open_loops, OPEN_PEERS),
    "bytes": (bytes_moved, PEERS),
}


def parser() -> ArgumentParser:
    made = arguments(__doc__)
    made.add_argument("--quick", action="store_true", help="a short look: fewer loads, shorter runs")
    made.add_argument("--only", default="", metavar="NAMES", help="only these peers, separated by commas")
    made.add_argument(
        "--parts", default=",".join(PARTS), metavar="NAMES", help=f"any of {', '.join(PARTS)} (default all)"
    )
    made.add_argument("--name", default="", help="name of the section for the open loops")
    made.add_argument("--repeat", type=int, default=1, metavar="N", help="rounds, to see whether the order is stable")
    return made


def end(number: int, frame: object) -> None:
    """Exit as on Ctrl-C, so that servers are stopped."""
    raise KeyboardInterrupt


def main() -> None:
    """Run the parts.

    SIGINT and SIGTERM are handled even if a background shell made this process ignore them: the servers would inherit
    that and could not be stopped.
    """
    given = parser().parse_args()
    signal.signal(signal.SIGINT, end)
    signal.signal(signal.SIGTERM, end)
    parts = given.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        raise SystemExit(f"no part {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    with workspace(given.keep) as folder:
        for part in parts:
            run, peers = PARTS[part]
            run(folder.absolute(), chosen(given.only, peers), given)


if __name__ == "__main__":
    main()
