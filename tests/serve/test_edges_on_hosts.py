"""Edges on other hosts than their server, disturbed on purpose: a client of one edge notices nothing of another one's
end, and no request is lost with the deciding process. Figures are printed (`pytest -s`)."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.hosts import WAIT_S, Host, Hosts, Process
from tests.serve.fleet import (
    HTTP,
    JOIN,
    LOST,
    MODEL,
    Asked,
    Fleet,
    Load,
    command_of,
    memory_files,
    running,
    tell,
    until,
    workers,
)
from tests.serve.test_agents_on_hosts import APP, GRAPH, PART, WIDTH

pytestmark = [pytest.mark.live, pytest.mark.needs_hosts]
NODES = {"local-0": 1, "local-1": 2}
"""The number of the host of each node."""
FRONT = (3, 4)
"""The hosts of edges."""


class Patient(Load):
    """Its requests have a minute."""

    def _message(self, asked: Asked) -> bytes:
        return super()._message(asked).replace(b"\r\n", b"\r\nx-slo-ms: 60000\r\n", 1)


class Deployment:
    """A server on host 0 with an edge of its own, agents on hosts 1 and 2, and edges on hosts 3 and 4."""

    def __init__(self, hosts: Hosts, folder: Path, app: str, models: Mapping[str, str]) -> None:
        self.hosts = hosts
        for name, text in models.items():
            (folder / name).write_text(text)
        self.fleet = Fleet(list(hosts), folder, app)
        self.edges: dict[int, Process] = {}
        self.others: list[Process] = []

    def start_edge(self, number: int, within: Sequence[str] = (), *options: str) -> Process:
        """An edge on a host, in the log `edge-NUMBER`. `within`: a command that runs it."""
        where = ["--join", f"{self.fleet.address}:{JOIN}", "--host", "0.0.0.0", "--http-port", str(HTTP)]
        argv = [*within, sys.executable, "-P", "-m", "sloop", "edge", *where, "--token-file", "token", *options]
        with (self.fleet.folder / f"edge-{number}.log").open("ab") as log:
            made = self.hosts[number].run(argv, cwd=self.fleet.folder, stdout=log, stderr=log)
        self.others.append(made)
        return made

    def restore(self, front: Sequence[int] = FRONT) -> None:
        """Have everything as at the beginning, with edges on these hosts and no others."""
        for host in self.hosts:
            host.heal()
            host.slow(None)
            host.resume()
        if self.fleet.server is None or self.fleet.server.poll() is not None:
            self.fleet.start_server()
        for name, number in NODES.items():
            agent = self.fleet.agents.get(name)
            if agent is None or agent.poll() is not None:
                self.fleet.start_agent(name, self.hosts[number])
        for number in [number for number in self.edges if number not in front]:
            process = self.edges.pop(number)
            process.terminate()
            assert process.wait(WAIT_S) == 0, self.fleet.log(f"edge-{number}")
        for number in front:
            if number not in self.edges or self.edges[number].poll() is not None:
                self.edges[number] = self.start_edge(number)
        self.fleet.until_ready(2)
        for number in front:
            self.until_serving(number)

    def until_serving(self, number: int) -> float:
        def is_serving() -> bool:
            with contextlib.suppress(OSError):
                return b"true" in self.fleet._get(f"http://{self.hosts[number].address}:{HTTP}/v2/health/ready").read()
            return False

        try:
            return until(is_serving, f"the edge on host {number} serves")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.fleet.log(f'edge-{number}')}") from None

    def load(self, number: int, rate_rps: float = 50, kind: type[Load] = Load) -> Load:
        """Of an edge."""
        return kind(self.hosts[number].address, "mlp", lambda x: 2 * x + 1, rate_rps=rate_rps)

    def stop(self) -> None:
        self.fleet.stop()
        for process in self.others:
            if process.poll() is None:
                process.kill()
            process.wait(WAIT_S)


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with Hosts(5) as hosts:
        made = Deployment(hosts, tmp_path_factory.mktemp("front"), APP, {"model.py": MODEL})
        try:
            yield made
        finally:
            made.stop()


@pytest.fixture
def deployment(deployed: Deployment) -> Deployment:
    deployed.restore()
    return deployed


def test_two_edges_serve_and_the_server_counts_what_they_do(deployment: Deployment) -> None:
    fleet = deployment.fleet
    before = fleet.metric("sloop_requests_total")
    with deployment.load(3) as one, deployment.load(4) as other:
        one.go_on(2)
        until(lambda: fleet.metric("sloop_connections") >= 2, "connections of both are counted")
    for load in (one, other):
        load.check([200])
        tell(f"{load.describe()}; slowest answer {load.slowest_ms():.0f} ms")
    assert fleet.metric("sloop_requests_total") - before == len(one.asked) + len(other.asked)
    assert fleet.metric("sloop_edges") == 3


def test_a_killed_edge_costs_its_own_clients_only(deployment: Deployment) -> None:
    fleet = deployment.fleet
    lost = fleet.metric("sloop_edges_lost_total")
    with deployment.load(3) as own, deployment.load(4) as others:
        own.go_on(0.7)
        fault_s = time.monotonic()
        deployment.edges[3].kill()
        until(lambda: fleet.metric("sloop_edges_lost_total") > lost, "the loss is seen")
        deployment.edges[3] = deployment.start_edge(3)
        deployment.until_serving(3)
        own.until_steady()
    tell(f"edge killed, its clients: {own.describe()}; only 200 after {own.disturbed_s(fault_s):.2f} s")
    tell(f"clients of the other one: {others.describe()}; slowest answer {others.slowest_ms(fault_s):.0f} ms")
    own.check((200, LOST))
    others.check([200])
    assert fleet.metric("sloop_edges_lost_total") == lost + 1


def test_an_edge_that_is_told_to_stop_loses_nothing(deployment: Deployment) -> None:
    """Clients see connections refused from then on, and none that is lost with a request on it."""
    fleet = deployment.fleet
    lost = fleet.metric("sloop_edges_lost_total")
    with deployment.load(3) as own, deployment.load(4) as others:
        own.go_on(0.5)
        deployment.edges[3].terminate()
        assert deployment.edges[3].wait(WAIT_S) == 0, fleet.log("edge-3")
        stopped_s = time.monotonic()
    tell(f"edge told to stop: {own.describe()}")
    others.check([200])
    own.check((200, LOST))
    assert all(asked.sent_s > stopped_s - 3 for asked in own.asked if asked.ends == [LOST])
    until(lambda: fleet.metric("sloop_edges") == 2, "it has left")
    assert fleet.metric("sloop_edges_lost_total") == lost


def test_an_edge_that_is_cut_off_comes_back_with_its_requests(deployment: Deployment) -> None:
    """Its clients are cut off too; what they have sent is answered when the host is healed, once each."""
    fleet = deployment.fleet
    lost = fleet.metric("sloop_edges_lost_total")
    with deployment.load(3, kind=Patient) as own, deployment.load(4) as others:
        own.go_on(0.7)
        fault_s = time.monotonic()
        deployment.hosts[3].cut()
        until(lambda: fleet.metric("sloop_edges_lost_total") > lost, "the loss is seen")
        seen_s = time.monotonic() - fault_s
        deployment.hosts[3].heal()
        back_s = deployment.until_serving(3)
        own.until_steady()
    tell(f"edge cut off: noticed after {seen_s:.1f} s, serving {back_s:.1f} s after it was healed; {own.describe()}")
    tell(f"clients of the other one: {others.describe()}; slowest answer {others.slowest_ms(fault_s):.0f} ms")
    own.check([200])
    others.check([200])


def test_a_server_that_is_cut_off_makes_requests_wait(deployment: Deployment) -> None:
    edges = [deployment.fleet.log(f"edge-{number}").count("has ended") for number in FRONT]
    with deployment.load(3, kind=Patient) as one, deployment.load(4, kind=Patient) as other:
        one.go_on(0.7)
        fault_s = time.monotonic()
        deployment.hosts[0].cut()
        until(
            lambda: (
                [deployment.fleet.log(f"edge-{number}").count("has ended") for number in FRONT]
                == [each + 1 for each in edges]
            ),
            "both edges notice",
        )
        deployment.hosts[0].heal()
        one.until_steady()
        other.until_steady()
    for load in (one, other):
        tell(f"server cut off: {load.describe()}; slowest answer {load.slowest_ms(fault_s - 1):.0f} ms")
        load.check([200])


def test_a_slow_link_slows_the_clients_of_its_edge_only(deployment: Deployment) -> None:
    with deployment.load(3, kind=Patient) as own, deployment.load(4) as others:
        own.go_on(0.5)
        fault_s = time.monotonic()
        deployment.hosts[3].slow(100e3)
        own.go_on(2)
        deployment.hosts[3].slow(None)
        own.until_steady()
    tell(f"link of 100 kbit/s: {own.describe()}; slowest answer {own.slowest_ms(fault_s):.0f} ms")
    tell(f"clients of the other one: {others.describe()}; slowest answer {others.slowest_ms(fault_s):.0f} ms")
    own.check([200])
    others.check([200])


@pytest.mark.parametrize("times", [1, 2])
def test_a_killed_server_costs_no_request_of_its_edges(deployment: Deployment, times: int) -> None:
    """Another one starts, has the replicas back from the agents, and gets what waits from the edges. It is killed as
    soon as it has them, if it is to be killed twice."""
    fleet, hosts = deployment.fleet, [deployment.hosts[number] for number in NODES.values()]
    before = [workers(host) for host in hosts]
    with deployment.load(3, kind=Patient) as one, deployment.load(4) as short:
        one.go_on(0.7)
        fault_s = time.monotonic()
        for _ in range(times):
            assert fleet.server is not None
            fleet.server.kill()
            fleet.server.wait(WAIT_S)
            fleet.start_server()
            deployment.until_serving(3)
        away_s = time.monotonic() - fault_s
        one.until_steady()
        short.until_steady()
        fleet.until_ready(2)
    for host, earlier in zip(hosts, before, strict=True):
        assert workers(host), "each has a replica"
        assert set(workers(host)) <= set(earlier), "it was kept"
    slowest_s = one.slowest_ms(fault_s - 1) / 1e3
    tell(f"server killed {times} x: serving after {away_s:.1f} s; a cold start takes {fleet.cold_start_s():.1f} s")
    tell(f"requests with 60 s: {one.describe()}; slowest answer {slowest_s:.1f} s")
    tell(f"requests with 1 s: {short.describe()}; only 200 after {short.disturbed_s(fault_s):.1f} s")
    one.check([200])
    short.check((200, 503, 504))


def test_a_server_that_is_told_to_stop_ends_its_edges(deployment: Deployment) -> None:
    fleet = deployment.fleet
    assert fleet.server is not None
    with deployment.load(3) as load:
        load.go_on(0.5)
        fleet.server.send_signal(signal.SIGTERM)
        assert fleet.server.wait(WAIT_S) == 0, fleet.log()
        assert [deployment.edges[number].wait(WAIT_S) for number in FRONT] == [0, 0], fleet.log("edge-3")
    tell(f"server told to stop: {load.describe()}")
    assert not [name for name in ("server", "edge-3", "edge-4") if "Traceback" in fleet.log(name)]
    load.check((200, 503, 504, LOST))


def test_an_edge_whose_clock_shows_another_time(deployment: Deployment) -> None:
    """By eleven days, as that of a machine that was started then; requests have the age that they have."""
    within = ["unshare", "--time", "--monotonic", "1000000", "--fork", "--kill-child"]
    if subprocess.run([*within, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine has no namespaces of time")
    deployment.restore(front=[4])
    other = deployment.start_edge(3, within)
    deployment.until_serving(3)
    with deployment.load(3) as load:
        load.go_on(1)
    other.kill()
    other.wait(WAIT_S)
    tell(f"another clock: {load.describe()}; slowest answer {load.slowest_ms():.0f} ms")
    load.check([200])


def test_an_edge_that_may_not_serve_says_why(deployment: Deployment) -> None:
    folder, fleet = deployment.fleet.folder, deployment.fleet
    deployment.restore(front=[4])
    (folder / "keys").write_text("robot secret\n")
    (folder / "keys").chmod(0o600)
    keyed = deployment.start_edge(3, (), "--api-key-file", "keys")
    assert keyed.wait(WAIT_S) == 1
    assert "the server's own edges do not" in fleet.log("edge-3")
    with deployment.load(4) as load:
        load.go_on(0.3)
    load.check([200])


# Large tensors


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Two stages on two hosts, between which 600 kB per request travel, as they do from the edge and back."""
    parts = {"double.py": PART % ("x", "y", 0.005, "2 * x"), "add.py": PART % ("y", "z", 0.06, "x + 1")}
    with Hosts(5) as hosts:
        made = Deployment(hosts, tmp_path_factory.mktemp("graph"), GRAPH, parts)
        try:
            yield made
        finally:
            made.stop()


def large(host: Host, kind: type[Load] = Load) -> Load:
    return kind(host.address, "pair", lambda x: 2 * x + 1, rate_rps=8, width=WIDTH, together=2)


def mapped(pids: Sequence[int]) -> set[int]:
    """The inodes of shared memory that processes have mapped."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if "/memfd:sloop" in line:
                    found.add(int(line.split()[4]))
    return found


def held(pids: Sequence[int]) -> set[int]:
    return {inode for _, inode in memory_files(pids)}


def test_large_tensors_travel_between_an_edge_and_agents_and_leave_no_memory(graph: Deployment) -> None:
    graph.restore()
    fleet = graph.fleet
    with large(graph.hosts[3]) as load:
        load.go_on(3)
    spent = sorted(1e3 * (each.ended_s - each.sent_s) for each in load.asked)
    through = len(load.asked) * WIDTH * 4
    memory = {host.name: sum(memory_files(host.pids()).values()) / 1e6 for host in graph.hosts}
    tell(f"600 kB by an edge elsewhere: {load.describe()}; median {spent[len(spent) // 2]:.0f} ms")
    tell(f"{through / 1e6:.0f} MB came in; shared memory afterwards, in MB: {memory}")
    load.check([200])
    until(lambda: fleet.metric("sloop_body_bytes") == 0, "no body is held")
    assert max(memory.values()) < through / 1e6 / 2


def test_an_edge_and_an_agent_on_one_host_share_memory(graph: Deployment) -> None:
    """The agent's workers map the edge's memory, and the edge that of the workers; nothing is fetched from it."""
    graph.restore(front=[4])
    fleet = graph.fleet
    (name,) = (node for stage, node in fleet.stages() if stage == "double")
    host = graph.hosts[NODES[name]]
    beside = graph.start_edge(host.number)
    graph.until_serving(host.number)
    with large(host) as load:
        load.go_on(1.5)
        (edge,) = (pid for pid in running(host, "sloop edge") if command_of(pid).startswith(sys.executable))
        agent = running(host, "sloop agent")
        assert mapped(workers(host)) & held([edge]), "a worker reads the edge's memory"
    tell(f"edge beside an agent: {load.describe()}; slowest answer {load.slowest_ms():.0f} ms")
    load.check([200])
    own = held([edge])
    assert held(agent) & own, "by a file of the agent"
    beside.terminate()
    assert beside.wait(WAIT_S) == 0, fleet.log(f"edge-{host.number}")
    until(lambda: not held(agent) & own, "the agent keeps nothing of an edge that has left")


@pytest.mark.parametrize("what", ["edge cut off", "server killed", "edge killed"])
def test_large_requests_when_something_breaks(graph: Deployment, what: str) -> None:
    graph.restore()
    fleet = graph.fleet
    assert fleet.server is not None
    with large(graph.hosts[3], Patient) as own, large(graph.hosts[4], Patient) as others:
        own.go_on(1)
        if what == "server killed":
            fleet.server.kill()
            fleet.server.wait(WAIT_S)
            fleet.start_server()
        elif what == "edge killed":
            lost = fleet.metric("sloop_edges_lost_total")
            os.kill(graph.edges[3].pid, signal.SIGKILL)
            until(lambda: fleet.metric("sloop_edges_lost_total") > lost, "the loss is seen")
            graph.edges[3] = graph.start_edge(3)
            graph.until_serving(3)
        else:
            ended = fleet.log("edge-3").count("has ended")
            graph.hosts[3].cut()
            until(lambda: fleet.log("edge-3").count("has ended") > ended, "it notices")
            graph.hosts[3].heal()
        own.until_steady(10)
        others.until_steady(10)
    tell(f"{what}, 600 kB: {own.describe()}; slowest answer {own.slowest_ms():.0f} ms; others: {others.describe()}")
    tell(str(dict(own.bodies + others.bodies)))
    own.check((200, LOST) if what == "edge killed" else [200])
    others.check([200])
