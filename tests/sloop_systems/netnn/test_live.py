"""The demonstration: emulated everywhere, in namespaces and the kernel where this machine allows it."""

import pytest

from sloop_systems.netnn.detection import FeatureEncoding
from sloop_systems.netnn.live import LiveReport, demonstrate
from sloop_systems.netnn.program import Program, compile_network
from sloop_systems.netnn.quantiser import quantise
from sloop_systems.netnn.traffic import TCP
from sloop_systems.netnn.training import Architecture
from sloop_systems.netnn.xdp import why_no_xdp

ENCODING = FeatureEncoding()


@pytest.fixture(scope="module")
def program() -> Program:
    """A small network on the features of a flow; it has learnt nothing."""
    network = Architecture(ENCODING.inputs, (), (4,)).made(1)
    return compile_network(quantise(network, [[1] * ENCODING.inputs]))


def _check(report: LiveReport) -> None:
    assert report.sent == report.received > 20
    assert report.unchanged
    assert report.counts["packets"] == report.sent
    assert (
        report.counts["votes"] + report.counts.get("no_slot", 0) + report.counts["without_verdict"]
        == (report.counts["points"])
    )
    assert report.flows
    assert len(report.delays_ms) > 0
    assert 0 <= report.right <= 1
    assert all(flow.name.endswith("TCP" if "TCP" in flow.name else "UDP") for flow in report.flows)
    assert TCP == 6


def test_without_rights_the_emulator_stands_in_and_says_so(program: Program) -> None:
    seen: list[float] = []
    report = demonstrate(program, ENCODING, seconds=1, seed=1, kernel=False, watch=lambda now_s, _: seen.append(now_s))
    assert report.runner == "emulator (it was asked for)"
    _check(report)
    assert seen[-1] == 1
    again = demonstrate(program, ENCODING, seconds=1, seed=1, kernel=False)
    assert [flow.verdict for flow in again.flows] == [flow.verdict for flow in report.flows]


@pytest.mark.needs_hosts
@pytest.mark.skipif(bool(why_no_xdp()), reason=why_no_xdp() or "-")
def test_in_namespaces_packets_are_forwarded_unchanged_and_every_flow_gets_a_verdict(program: Program) -> None:
    report = demonstrate(program, ENCODING, seconds=2, seed=1, kernel=True)
    assert report.runner == "kernel"
    _check(report)
    emulated = demonstrate(program, ENCODING, seconds=2, seed=1, kernel=False)
    assert {flow.name for flow in report.flows} == {flow.name for flow in emulated.flows}
