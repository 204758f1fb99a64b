"""One server of a peer: started, checked to answer like ONNX Runtime, and ready for load."""

from collections.abc import Iterator
from contextlib import contextmanager

from msgspec import Struct

from benchmarks.peers.answer_check import check, expected, row_of
from benchmarks.peers.environments import python_of
from benchmarks.peers.peer import Ask, Case, Encoding, Peer
from benchmarks.peers.processes import Server, free_port, running

FORMS = {Encoding.JSON: "", Encoding.BINARY: ", binary"}


class Serving(Struct, frozen=True):
    """A running server and its request."""

    server: Server
    ask: Ask
    wanted: list[float]

    def settle(self) -> None:
        """Wait until the server answers again and its queues are empty. PeerFailed if it does not."""
        check(self.server.port, self.ask, self.wanted)


def label(peer: Peer, encoding: Encoding) -> str:
    """The name of its row in a table."""
    return peer.name + FORMS[encoding]


@contextmanager
def serving(peer: Peer, case: Case, seed: int) -> Iterator[Serving]:
    """Run the peer's server. PeerFailed if it cannot be installed, does not start, or answers wrongly."""
    python = python_of(peer.environment)
    case.folder.mkdir(parents=True, exist_ok=True)
    launch = peer.launch(case, python, free_port())
    row = row_of(case.model, seed)
    ask, wanted = peer.ask(case, row), expected(case.model, row)
    with running(launch, case.folder / "words.txt") as server:
        check(server.port, ask, wanted)
        yield Serving(server, ask, wanted)
