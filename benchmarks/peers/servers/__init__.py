"""The servers that are compared, in the order of the tables."""

from typing import Final

from benchmarks.peers.peer import Peer
from benchmarks.peers.servers.bentoml import BENTOML
from benchmarks.peers.servers.litserve import LITSERVE
from benchmarks.peers.servers.mlserver import MLSERVER
from benchmarks.peers.servers.mosec import MOSEC, MOSEC_MSGSPEC
from benchmarks.peers.servers.ours import SLOOP
from benchmarks.peers.servers.ray import RAY_SERVE
from benchmarks.peers.servers.triton import TRITON

PEERS: Final[tuple[Peer, ...]] = (SLOOP, MOSEC, MOSEC_MSGSPEC, LITSERVE, BENTOML, RAY_SERVE, TRITON, MLSERVER)
