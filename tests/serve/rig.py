"""What tests and benchmarks put around single parts: a stage alone, a batch of tensors, an edge without ports."""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sloop.app.limits import Limits, ServerLimits
from sloop.serve.blocks import Block, BlockReader, write_block
from sloop.serve.dataflow import APPLICATION, Assembly, Need, Source, StageWiring
from sloop.serve.driver import Driver, ServedVersion
from sloop.serve.edge.process import EdgeServer, EdgeSettings
from sloop.serve.edge.sink import EdgeSink
from sloop.serve.edges import EdgePort
from sloop.serve.messages import Ask, OfferModel, Run, ToEdge, Topic
from sloop.serve.protocols import PageSource, Servable
from sloop.shared_memory import Arena, Arenas
from sloop.systems.setup import Setup
from sloop.tensor import Signature, Tensor

EDGE = EdgeSettings(ServerLimits(body_bytes=1 << 20, bytes=1 << 22, json_body_bytes=1 << 20, requests=1 << 10))


def limited(setup: Setup, **limits: Any) -> Setup:
    """The setup with these limits of its server, and without spare workers unless they say so."""
    deployment = setup.deployment
    changed = replace(deployment.limits, **{"spare_workers": 0, **limits})
    return replace(setup, deployment=replace(deployment, limits=changed))


def alone(stage: str, signature: Signature) -> StageWiring:
    """A stage whose inputs are what the client sends."""
    sources = tuple((Source(APPLICATION, place),) for place in range(len(signature.inputs)))
    return StageWiring(stage, Assembly(sources, (Need(APPLICATION, "whole"),)))


def wirings_of(servables: Mapping[tuple[str, str], Servable]) -> dict[str, StageWiring]:
    """Each stage alone."""
    return {stage: alone(stage, servable.signature) for (stage, _), servable in servables.items()}


def run_of(requests: Sequence[Sequence[Tensor]]) -> Run:
    """A batch, whatever its size, without shared memory."""
    return Run(len(requests), [write_block(tensors, None) for tensors in requests])


def tensors_in(blocks: Sequence[Block | None], holder: int = 0) -> list[list[Tensor]]:
    """The tensors of blocks; this process holds the arenas."""
    reader = BlockReader({0: holder or os.getpid()})
    return [reader.tensors(block) for block in blocks if block is not None]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # what is waited for has no event of its own
        await asyncio.sleep(0.001)


def no_page(_question: Ask[Topic], _then: Callable[[bytes], None]) -> None:
    """Answers no question."""


def edge_within(driver: Driver, page_of: PageSource, arenas: Arenas) -> tuple[EdgePort, EdgeServer]:
    """An edge in this process, which has not started, and its port: what a process does, without frames."""

    def tell(record: ToEdge) -> None:
        server.acts[type(record)](record)

    port = EdgePort(driver, page_of, arenas, tell)
    arena = Arena(port.arena.number, port.arena.fd)
    server = EdgeServer(EDGE, lambda record: port.acts[type(record)](record), arena, os.getpid())
    return port, server


def sink_before(driver: Driver, served: ServedVersion, arenas: Arenas) -> EdgeSink:
    """An edge in this process without ports, which offers one version."""
    port, edge = edge_within(driver, no_page, arenas)
    answers = {served.version: served.wiring.answer}
    signature = served.wiring.signature
    port.tell(OfferModel(served.application, served.slo_ns, signature, Limits(), {}, (served.version,), answers))
    return edge.sink
