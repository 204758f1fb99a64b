"""An edge on free ports of loopback, before a fake driver."""

import gc
from collections.abc import Iterator

import pytest

from tests.serve.edge.fakes import FakeDriver, Gateway, LoopThread, make_service, rpc_server, web_server


@pytest.fixture(scope="module")
def loop_thread() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()
    gc.collect()  # the clients of tritonclient must end in the thread that made them


@pytest.fixture(scope="module")
def shared_gateway(loop_thread: LoopThread) -> Iterator[Gateway]:
    """One edge per test module; `gateway` hands it out with a clean driver."""
    gateway = Gateway(FakeDriver())
    gateway.service = service = make_service(gateway)
    listener = web_server(service)
    gateway.port = loop_thread.serve(listener)
    rpc = rpc_server(service)
    gateway.grpc_port = loop_thread.serve(rpc)
    yield gateway
    loop_thread.call(rpc.close(1.0))
    loop_thread.call(listener.close(1.0))


@pytest.fixture
def gateway(shared_gateway: Gateway) -> Gateway:
    driver = shared_gateway.driver
    driver.respond, driver.at_once = None, False
    for record in (driver.seen, driver.asked, driver.stored, driver.names, driver.ages_ns, driver.cancelled):
        record.clear()
    driver.heard.clear()
    driver.gone.clear()
    shared_gateway.why_unready = ""
    shared_gateway.states.clear()
    shared_gateway.changes.clear()
    return shared_gateway
