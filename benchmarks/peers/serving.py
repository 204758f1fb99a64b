"""One server of a peer, started, proven to answer as the bare runtime does, and ready to be loaded."""

from collections.abc import Iterator
from contextlib import contextmanager

from msgspec import Struct

from benchmarks.peers.asked import check, expected, row_of
from benchmarks.peers.environments import python_of
from benchmarks.peers.peer import Ask, Case, Encoding, Peer
from benchmarks.peers.processes import Server, free_port, running

FORMS = {Encoding.JSON: "", Encoding.BINARY: ", binary"}


class Serving(Struct, frozen=True):
    """A server and the request it is asked."""

    server: Server
    ask: Ask
    wanted: list[float]

    def settle(self) -> None:
        """Until it answers again: what a load left in its queues is gone. PeerFailed where it does not."""
        check(self.server.port, self.ask, self.wanted)


def label(peer: Peer, encoding: Encoding) -> str:
    """As a row of a table is named."""
    return peer.name + FORMS[encoding]


@contextmanager
def serving(peer: Peer, case: Case, seed: int) -> Iterator[Serving]:
    """The peer serving the case. PeerFailed where it cannot be installed, does not start or answers something else."""
    python = python_of(peer.environment)
    case.folder.mkdir(parents=True, exist_ok=True)
    launch = peer.launch(case, python, free_port())
    row = row_of(case.model, seed)
    ask, wanted = peer.ask(case, row), expected(case.model, row)
    with running(launch, case.folder / "words.txt") as server:
        check(server.port, ask, wanted)
        yield Serving(server, ask, wanted)
