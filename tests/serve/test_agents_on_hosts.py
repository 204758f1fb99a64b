"""A server whose replicas run on other hosts, disturbed on purpose: every request is answered once and rightly, or its
client sees an error; afterwards all is as before. Figures are printed (`pytest -s`)."""

import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from sloop.serve.cluster.agent import GIVE_UP_S
from sloop.serve.network import SILENT_S
from tests.hosts import WAIT_S, Host, Hosts, is_running
from tests.serve.fleet import CAUGHT, LOST, MODEL, Fleet, Load, kill, memory_files, running, tell, until, workers

pytestmark = [pytest.mark.live, pytest.mark.needs_hosts]

APP = """
name: mlp
slo_ms: 1000
stages:
  - name: mlp
    model: model.py
    profile: {latency_ms: {form: quadratic, alpha: 0, beta: 0.1, gamma: 10}, max_batch: 4}
system: {name: static, replicas: 2, cores: 1, route: round_robin}
cluster: {nodes: [{hardware: local, count: 2, cores: 1}]}
"""
GRAPH = """
name: pair
slo_ms: 5000
stages:
  - name: double
    model: double.py
    profile: {latency_ms: {form: quadratic, alpha: 0, beta: 1, gamma: 5}, max_batch: 2}
  - name: add
    model: add.py
    after: [double]
    profile: {latency_ms: {form: quadratic, alpha: 0, beta: 1, gamma: 60}, max_batch: 2}
system: {name: static, replicas: 1, cores: 1}
cluster: {nodes: [{hardware: local, count: 2, cores: 1}]}
"""
PART = """
import time

class Model:
    inputs = {"%s": ("FP32", (-1, 150_000))}
    outputs = {"%s": ("FP32", (-1, 150_000))}
    joins_rows = True

    def __init__(self, threads):
        pass

    def run(self, x):
        time.sleep(%s)
        return %s
"""
"""Takes and gives 600 kB per request. The second one is slow, so that requests wait between the two."""
WIDTH = 150_000
NODES = {"local-0": 1, "local-1": 2}
"""The number of the host of each node."""


class Deployment:
    """A server on host 0 and agents on hosts 1 and 2, with a replica each; host 3 is spare."""

    def __init__(self, hosts: Hosts, folder: Path, app: str, models: Mapping[str, str]) -> None:
        self.hosts = hosts
        for name, text in models.items():
            (folder / name).write_text(text)
        self.fleet = Fleet(list(hosts), folder, app)

    @property
    def agent_hosts(self) -> list[Host]:
        return [self.hosts[number] for number in NODES.values()]

    def restore(self) -> None:
        """Have everything as at the beginning, with both replicas ready, whatever a test has left."""
        for host in self.hosts:
            host.heal()
            host.slow(None)
            host.resume()
        server = self.fleet.server
        if server is None or server.poll() is not None:
            self.fleet.start_server()
        for name, number in NODES.items():
            agent = self.fleet.agents.get(name)
            if agent is None or agent.poll() is not None:
                self.fleet.start_agent(name, self.hosts[number])
        self.fleet.until_ready(2)

    def host_of(self, node: str) -> Host:
        return self.hosts[NODES[node]]

    def load(self, rate_rps: float = 100) -> Load:
        return Load(self.fleet.address, "mlp", lambda x: 2 * x + 1, rate_rps=rate_rps)

    def report(self, what: str, load: Load, fault_s: float, back_s: float | None = None) -> None:
        """Prints what a fault has cost."""
        back = "" if back_s is None else f"; both replicas after {back_s:.1f} s"
        start_s = self.fleet.cold_start_s()
        start = f"a cold start takes {start_s:.2f} s" if start_s else "no cold start"
        tell(
            f"{what}: {load.describe()}; only 200 after {load.disturbed_s(fault_s):.2f} s{back}; "
            f"slowest answer {load.slowest_ms():.0f} ms; {start}"
        )


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with Hosts(4) as hosts:
        made = Deployment(hosts, tmp_path_factory.mktemp("deployment"), APP, {"model.py": MODEL})
        try:
            yield made
        finally:
            made.fleet.stop()


@pytest.fixture
def deployment(deployed: Deployment) -> Deployment:
    deployed.restore()
    return deployed


def test_a_killed_worker_costs_no_request(deployment: Deployment) -> None:
    with deployment.load() as load:
        load.go_on(0.7)
        fault_s = time.monotonic()
        kill(workers(deployment.hosts[1]))
        until(lambda: len(deployment.fleet.ready()) < 2, "the loss is seen")
        back_s = deployment.fleet.until_ready(2)
        load.until_steady()
    deployment.report("worker killed", load, fault_s, back_s)
    load.check(CAUGHT)


def test_the_workers_of_a_killed_agent_die_and_the_next_agent_joins(deployment: Deployment) -> None:
    host, fleet = deployment.hosts[1], deployment.fleet
    own = workers(host)
    assert len(own) == 1
    with deployment.load() as load:
        load.go_on(0.7)
        fault_s = time.monotonic()
        fleet.agents["local-0"].kill()
        until(lambda: not any(map(is_running, own)), "its workers die with it")
        until(lambda: fleet.nodes()["local-0"] == "lost", "the node is lost")
        load.until_steady()
        fleet.start_agent("local-0", host)
        back_s = fleet.until_ready(2)
        load.until_steady()
    deployment.report("agent killed, another one started", load, fault_s, back_s)
    load.check(CAUGHT)


def test_a_killed_node_is_replaced_by_another_one(deployment: Deployment) -> None:
    fleet, spare = deployment.fleet, deployment.hosts[3]
    with deployment.load() as load:
        load.go_on(0.7)
        fault_s = time.monotonic()
        deployment.hosts[2].kill()
        fleet.start_agent("local-1", spare)
        until(lambda: len(fleet.ready()) < 2, "the loss is seen")
        back_s = fleet.until_ready(2)
        load.until_steady()
    deployment.report("node killed, another one joins", load, fault_s, back_s)
    assert len(workers(spare)) == 1
    load.check(CAUGHT)
    spare.kill()


class Cores:
    """Watches that no host runs more workers at the same time than its node has cores, which is one."""

    def __init__(self, hosts: list[Host]) -> None:
        self._hosts, self.most = hosts, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._stop.wait(0.03):
            self.most = max(self.most, *(len(workers(host)) for host in self._hosts))

    def __enter__(self) -> "Cores":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def test_a_node_that_is_cut_off_comes_back_without_its_workers(deployment: Deployment) -> None:
    """The server that has counted it as lost has replaced them; another one could adopt them, so they wait for it."""
    fleet, host = deployment.fleet, deployment.hosts[2]
    before, own = fleet.ready(), workers(host)
    with Cores(deployment.agent_hosts) as cores, deployment.load() as load:
        load.go_on(0.7)
        fault_s = time.monotonic()
        host.cut()
        lost_s = until(lambda: "lost" in fleet.nodes().values(), "the node is lost")
        load.until_steady()
        assert workers(host) == own
        host.heal()
        back_s = fleet.until_ready(2)
        load.until_steady()
    tell(f"the server has noticed after {lost_s:.1f} s")
    deployment.report("node cut off and healed", load, fault_s, back_s)
    assert not set(workers(host)) & set(own)
    assert len(set(fleet.ready()) - set(before)) == 1  # one replica is another one
    assert set(fleet.ready().values()) == set(NODES)
    assert cores.most == 1
    load.check(CAUGHT)


@pytest.mark.parametrize("how", ["cut", "paused"])
def test_what_is_shorter_than_the_silence_that_counts_costs_nothing(deployment: Deployment, how: str) -> None:
    fleet, host = deployment.fleet, deployment.hosts[1]
    before = fleet.ready()
    with deployment.load() as load:
        load.go_on(0.5)
        fault_s = time.monotonic()
        (host.cut if how == "cut" else host.pause)()
        load.go_on(SILENT_S / 4)
        (host.heal if how == "cut" else host.resume)()
        load.until_steady()
    deployment.report(f"node {how} for {SILENT_S / 4:g} s", load, fault_s)
    assert fleet.ready() == before
    load.check(CAUGHT)


def test_a_node_that_stood_still_stops_its_workers_before_it_comes_back(deployment: Deployment) -> None:
    fleet, host = deployment.fleet, deployment.hosts[1]
    before = fleet.ready()
    with Cores(deployment.agent_hosts) as cores, deployment.load() as load:
        load.go_on(0.5)
        fault_s = time.monotonic()
        host.pause()
        until(lambda: "lost" in fleet.nodes().values(), "the node is lost")
        load.until_steady()
        host.resume()
        back_s = fleet.until_ready(2)
        load.until_steady()
    deployment.report("node paused and resumed", load, fault_s, back_s)
    assert len(set(fleet.ready()) - set(before)) == 1
    assert cores.most == 1
    load.check(CAUGHT)


@pytest.mark.parametrize("how", ["link", "processes"])
def test_a_slow_node_gets_fewer_requests(deployment: Deployment, how: str) -> None:
    """Its link takes 16 kbit/s, or its processes stand still for most of the time."""
    fleet, host = deployment.fleet, deployment.hosts[1]
    before = fleet.ready()
    is_over = threading.Event()

    def hold_up() -> None:
        while not is_over.wait(0.02):
            host.pause()
            is_over.wait(0.2)
            host.resume()

    thread = threading.Thread(target=hold_up)
    with deployment.load() as load:
        load.go_on(0.5)
        fault_s = time.monotonic()
        host.slow(16e3) if how == "link" else thread.start()
        load.go_on(2.5)
        slow = [each for each in load.asked if each.sent_s > fault_s + 1 and each.ended_s]
        is_over.set()
        thread.join() if how != "link" else host.slow(None)
        load.until_steady()
    deployment.report(f"slow {how}", load, fault_s)
    spent = sorted(1e3 * (each.ended_s - each.sent_s) for each in slow)
    quantiles = [spent[int(len(spent) * part)] for part in (0.5, 0.9, 0.99)]
    tell("after the first second: median, p90, p99 of {:.0f}, {:.0f}, {:.0f} ms".format(*quantiles))
    assert sum(each.ends == [200] for each in slow) > 0.9 * len(slow)
    assert fleet.ready() == before
    load.check(CAUGHT)


def test_a_killed_edge_costs_its_connections_only(deployment: Deployment) -> None:
    fleet, host = deployment.fleet, deployment.hosts[0]
    before = fleet.ready()
    with deployment.load() as load:
        load.go_on(0.7)
        fault_s = time.monotonic()
        kill(running(host, "sloop.serve.edge.process"))
        load.until_steady()
    deployment.report("edge killed", load, fault_s)
    assert fleet.ready() == before
    load.check((200, LOST))


def test_agents_end_with_the_server_that_is_told_to_stop(deployment: Deployment) -> None:
    fleet = deployment.fleet
    assert fleet.server is not None
    with deployment.load() as load:
        load.go_on(0.5)
        fault_s = time.monotonic()
        fleet.server.send_signal(signal.SIGTERM)
        assert fleet.server.wait(WAIT_S) == 0, fleet.log()
        assert [agent.wait(WAIT_S) for agent in fleet.agents.values()] == [0, 0], fleet.log("local-0")
        ended_s = time.monotonic() - fault_s
    tell(f"server told to stop: {load.describe()}; all has ended after {ended_s:.1f} s")
    assert not any(workers(host) for host in deployment.hosts)
    load.check((200, 503, LOST))


# Another server takes the place of one that has died


def all_workers(deployment: Deployment) -> set[int]:
    return {pid for host in deployment.agent_hosts for pid in workers(host)}


def kill_server(fleet: Fleet) -> float:
    """Ends the server as a crash would; returns when."""
    assert fleet.server is not None
    fleet.server.kill()
    fleet.server.wait(WAIT_S)
    return time.monotonic()


def test_a_server_that_is_killed_is_followed_by_one_that_adopts_its_replicas(deployment: Deployment) -> None:
    fleet = deployment.fleet
    agents, before = list(fleet.agents.values()), all_workers(deployment)
    with Cores(deployment.agent_hosts) as cores, deployment.load() as load:
        load.go_on(0.5)
        fault_s = kill_server(fleet)
        fleet.start_server()
        back_s = fleet.until_ready(2)
        load.until_steady()
    deployment.report("server killed, another one started", load, fault_s, back_s)
    assert all_workers(deployment) == before
    assert fleet.metric("sloop_replicas_adopted_total") == 2
    assert fleet.metric("sloop_cold_start_seconds_count") == 0
    assert cores.most == 1
    assert [agent.poll() for agent in agents] == [None, None]
    load.check((200, 503, 504, LOST))  # the connections to the edges of the server that was killed


def test_a_server_that_is_killed_again_and_again(deployment: Deployment) -> None:
    """Also while it waits for agents, and before it has adopted what they have kept."""
    fleet, before = deployment.fleet, all_workers(deployment)
    with deployment.load() as load:
        load.go_on(0.3)
        for wait_s in (0.0, 0.9, 1.3, 1.7):
            fault_s = kill_server(fleet)
            fleet.start_server()
            load.go_on(wait_s)
        back_s = fleet.until_ready(2)
        load.until_steady()
    deployment.report("server killed four times", load, fault_s, back_s)
    assert all_workers(deployment) == before
    load.check((200, 503, 504, LOST))


def test_an_agent_that_comes_late_brings_its_workers(deployment: Deployment) -> None:
    """The server begins without it. Its replica gets another number: the one that it had is another's by then."""
    fleet, late = deployment.fleet, deployment.hosts[2]
    before = all_workers(deployment)
    late.cut()
    kill_server(fleet)
    began_s = time.monotonic()
    fleet.start_server()
    fleet.until_ready(1)
    tell(f"one of two agents is away: served again {time.monotonic() - began_s:.1f} s after the start")
    assert fleet.nodes()["local-1"] == "lost"
    late.heal()
    fleet.until_ready(2)
    assert all_workers(deployment) == before
    assert fleet.metric("sloop_replicas_adopted_total") == 2


def test_workers_of_another_application_file_are_stopped(deployment: Deployment) -> None:
    fleet, before = deployment.fleet, all_workers(deployment)
    (fleet.folder / "other.yaml").write_text(APP.replace("mlp", "other"))
    kill_server(fleet)
    with Cores(deployment.agent_hosts) as cores:
        fleet.start_server(app="other.yaml")
        fleet.until_ready(2)
        now = all_workers(deployment)
        assert not now & before
        assert fleet.metric("sloop_replicas_adopted_total") == 0
        kill_server(fleet)
        fleet.start_server()
        fleet.until_ready(2)
    assert not all_workers(deployment) & now
    assert cores.most == 1


def test_workers_whose_model_has_changed_are_stopped(deployment: Deployment) -> None:
    fleet, before = deployment.fleet, all_workers(deployment)
    kill_server(fleet)
    (fleet.folder / "model.py").write_text(MODEL + "\n")
    fleet.start_server()
    fleet.until_ready(2)
    assert len(all_workers(deployment)) == 2
    assert not all_workers(deployment) & before


def test_agents_and_their_workers_end_if_no_server_follows(deployment: Deployment) -> None:
    fleet = deployment.fleet
    kill_server(fleet)
    began_s = time.monotonic()
    codes = [agent.wait(2 * GIVE_UP_S) for agent in fleet.agents.values()]
    tell(f"agents have given up after {time.monotonic() - began_s:.0f} s")
    assert all(codes)
    assert not all_workers(deployment)


# Large tensors


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Two stages on two hosts, between which 600 kB per request travel."""
    parts = {"double.py": PART % ("x", "y", 0.005, "2 * x"), "add.py": PART % ("y", "z", 0.06, "x + 1")}
    with Hosts(4) as hosts:
        made = Deployment(hosts, tmp_path_factory.mktemp("graph"), GRAPH, parts)
        try:
            made.restore()
            yield made
        finally:
            made.fleet.stop()


def large(graph: Deployment) -> Load:
    """Four requests together, so that some wait between the stages."""
    return Load(graph.fleet.address, "pair", lambda x: 2 * x + 1, rate_rps=16, width=WIDTH, together=4)


def queued(fleet: Fleet, stage: str) -> int:
    """How many requests wait at a stage."""
    return sum(
        each["queued"] for app in fleet.state()["applications"] for each in app["stages"] if each["name"] == stage
    )


def test_large_tensors_travel_from_host_to_host_and_leave_no_memory(graph: Deployment) -> None:
    fleet = graph.fleet
    graph.restore()
    assert sorted(fleet.ready().values()) == ["local-0", "local-1"]
    with large(graph) as load:
        load.go_on(4)
    spent = sorted(1e3 * (each.ended_s - each.sent_s) for each in load.asked)
    through = len(load.asked) * WIDTH * 4
    held = {host.name: sum(memory_files(host.pids()).values()) / 1e6 for host in graph.hosts}
    tell(f"600 kB over two hosts: {load.describe()}; median {spent[len(spent) // 2]:.0f} ms, p99 {spent[-2]:.0f} ms")
    tell(f"{through / 1e6:.0f} MB came in; shared memory afterwards, in MB: {held}")
    load.check([200])
    reported = ("sloop_body_bytes", "sloop_answer_bytes")  # by the edges, on their own time
    until(lambda: not any(map(fleet.metric, reported)), "both are 0 again")
    assert max(held.values()) < through / 1e6 / 2  # freed blocks that are used again; a leak would keep all


@pytest.mark.parametrize("name", NODES)
def test_large_tensors_of_an_agent_beside_the_server_and_one_elsewhere(graph: Deployment, name: str) -> None:
    """Host 0 then has both the memory of the edge and that of a worker; the other agent fetches from either."""
    fleet, here = graph.fleet, graph.hosts[0]
    graph.restore()
    fleet.agents[name].terminate()
    assert fleet.agents[name].wait(WAIT_S) == 0
    fleet.start_agent(name, here)
    until(lambda: workers(here), "a worker beside the server")
    fleet.until_ready(2)
    with large(graph) as load:
        load.until_steady(10)
    tell(f"{name} beside the server: {load.describe()}; slowest answer {load.slowest_ms():.0f} ms")
    load.check([200])
    fleet.agents[name].terminate()
    assert fleet.agents[name].wait(WAIT_S) == 0


@pytest.mark.parametrize("how", ["cut off", "killed"])
def test_requests_whose_tensors_are_lost_with_a_node_fail_and_no_other_does(graph: Deployment, how: str) -> None:
    """The node with the first stage has the only copy of what the second one reads."""
    fleet = graph.fleet
    graph.restore()
    (name,) = (node for stage, node in fleet.stages() if stage == "double")
    host = graph.host_of(name)
    with large(graph) as load:
        load.go_on(1)
        until(lambda: queued(fleet, "add"), "a request waits between the stages")
        fault_s = time.monotonic()
        (host.kill if how == "killed" else host.cut)()
        until(lambda: fleet.nodes()[name] == "lost", "the node is lost")
        host.heal()
        if how == "killed":
            fleet.start_agent(name, host)
        back_s = fleet.until_ready(2)
        load.until_steady(10)
    graph.report(f"node with a large tensor {how}", load, fault_s, back_s)
    tell(str(dict(load.bodies)))
    load.check()
    assert load.counts()[500]
    assert all("tensors" in body for body in load.bodies if body.startswith('{"error":"failed'))
    agents = [running(host, "joining.py") for host in graph.agent_hosts]
    until(  # what the server had over a connection that has ended stays for `LINGER_S`
        lambda: [len(memory_files(pids)) for pids in agents] == [2, 2], "each has its own arena and its worker's"
    )
