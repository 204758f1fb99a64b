"""The servers that are compared, in the order of the tables."""

from typing import Final

from benchmarks.peers.peer import Peer
from benchmarks.peers.servers.bentoml import BENTOML
from benchmarks.peers.servers.litserve import LITSERVE
from benchmarks.peers.servers.mlserver import MLSERVER
from benchmarks.peers.servers.mosec import MOSEC, MOSEC_MSGSPEC
from benchmarks.peers.servers.ours import SLOOP, SLOOP_STATIC
from benchmarks.peers.servers.ray import RAY_SERVE
from benchmarks.peers.servers.triton import TRITON

PEERS: Final[tuple[Peer, ...]] = (SLOOP, MOSEC, MOSEC_MSGSPEC, LITSERVE, BENTOML, RAY_SERVE, TRITON, MLSERVER)
OPEN_PEERS: Final[tuple[Peer, ...]] = (SLOOP, SLOOP_STATIC, *PEERS[1:])
"""Under deadlines sloop stands twice: as it is meant for them, and with the baseline that lets everybody in."""
