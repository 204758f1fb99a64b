"""A gateway on free ports of loopback, before a fake driver."""

from collections.abc import Iterator

import pytest

from sloop.serve.gateway.http import HttpServer
from sloop.serve.gateway.rest import Rest
from sloop.serve.gateway.rpc import Rpc
from tests.serve.gateway.fakes import FakeDriver, Gateway, LoopThread, make_service


@pytest.fixture(scope="module")
def loop_thread() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


@pytest.fixture(scope="module")
def shared_gateway(loop_thread: LoopThread) -> Iterator[Gateway]:
    """One gateway per test module; `gateway` hands it out with a clean driver."""
    gateway = Gateway(FakeDriver())
    gateway.service = service = make_service(gateway)
    listener = HttpServer(Rest(service).answer, bodies=service.bodies, requests_max=64)
    gateway.port = loop_thread.call(listener.start(gateway.host, 0))
    rpc = Rpc(service, requests_max=64)
    gateway.grpc_port = loop_thread.call(rpc.start(gateway.host, 0))
    yield gateway
    loop_thread.call(rpc.close(1.0))
    loop_thread.call(listener.close())


@pytest.fixture
def gateway(shared_gateway: Gateway) -> Gateway:
    driver = shared_gateway.driver
    driver.respond, driver.at_once = None, False
    for record in (driver.seen, driver.asked, driver.ages_ns, driver.cancelled, driver.heard, driver.gone):
        record.clear()
    shared_gateway.why_unready = ""
    shared_gateway.states.clear()
    return shared_gateway
