"""Emulated switches on real packets give the reference's answers, and none where packets are lost."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sloop.errors import InputError, MachineError
from sloop_systems.netnn.emulator import Faults, InferenceEnding
from sloop_systems.netnn.packet_fabric import PacketFabric
from sloop_systems.netnn.program import compile_network
from tests.sloop_systems.netnn.models import model, rows_of, small_model

pytestmark = [pytest.mark.live, pytest.mark.needs_hosts]


def test_rows_equal_the_reference() -> None:
    network = small_model()
    rows = rows_of(network, 12)
    with PacketFabric(compile_network(network)) as fabric:
        verdicts = fabric.run(rows, timeout_s=60)
    assert [verdict.logits for verdict in verdicts] == [tuple(logits) for logits in network.run(rows).tolist()]
    assert [sum(unit.packets for unit in units) for units in fabric.counts] == [12 * n for n in (228, 304, 128, 16, 4)]
    assert not any(unit.drops for units in fabric.counts for unit in units)


def test_order_and_duplicates_change_nothing() -> None:
    network = model(40, [(6, 3, 2), (5, 2, 2)], [3], [3, 7], seed=2)
    rows = rows_of(network, 24)
    with PacketFabric(compile_network(network), faults=Faults(duplicates=0.2, jitter_ns=2e7), seed=4) as fabric:
        verdicts = fabric.run(rows, timeout_s=60)
    assert [verdict.logits for verdict in verdicts] == [tuple(logits) for logits in network.run(rows).tolist()]
    drops = [sum(unit.drops.get("duplicate", 0) for unit in units) for units in fabric.counts]
    assert min(drops) > 0, fabric.counts


def test_losses_give_no_wrong_verdict() -> None:
    network = model(40, [(6, 3, 2), (5, 2, 2)], [3], [3, 7], seed=2)
    rows = rows_of(network, 40)
    expected = [tuple(logits) for logits in network.run(rows).tolist()]
    faults = Faults(loss=0.002, duplicates=0.1, jitter_ns=5e6)
    with PacketFabric(compile_network(network), faults=faults, seed=1) as fabric:
        verdicts = fabric.run(rows, timeout_s=1)
    endings = {verdict.ending for verdict in verdicts}
    assert InferenceEnding.ABORTED in endings
    assert endings <= {InferenceEnding.ABORTED, InferenceEnding.VERDICT}
    for verdict in verdicts:
        assert verdict.logits in {None, expected[verdict.row]}


CHILD = """
import os, sys, signal
from sloop_systems.netnn.packet_fabric import PacketFabric
from sloop_systems.netnn.program import compile_network
from tests.sloop_systems.netnn.models import rows_of, small_model
with PacketFabric(compile_network(small_model())) as fabric:
    fabric.run(rows_of(small_model(), 1), timeout_s=60)
    print("ready", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_its_processes_end_with_the_process_that_made_it() -> None:
    mark = f"sloop-fabric-{os.getpid()}"
    environment = {**os.environ, "SLOOP_TEST_MARK": mark}
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        process.wait()
    give_up = time.monotonic() + 60
    while marked(mark):
        assert time.monotonic() < give_up
        time.sleep(0.01)


def marked(mark: str) -> list[str]:
    """Processes with this mark in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(folder.name)
        except OSError:  # it is gone
            continue
    return found


def test_what_it_cannot_do_is_refused() -> None:
    program = compile_network(small_model())
    with pytest.raises(InputError, match="real packets have no numbers"):
        PacketFabric(program, faults=Faults(lost=frozenset({(0, 1)})))
    with pytest.raises(MachineError, match="the fabric is not open"):
        PacketFabric(program).run(rows_of(small_model(), 1))
