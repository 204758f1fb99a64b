"""A server on a Ray cluster of three hosts: what it takes and starts there, what is left afterwards, and what
happens when parts of it die. Figures are printed (`pytest -s`)."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import pytest

from tests.hosts import WAIT_S, Host, Hosts, RayCluster
from tests.serve.fleet import CAUGHT, MODEL, Fleet, Load, kill, running, tell, until, workers

pytestmark = [
    pytest.mark.live,
    pytest.mark.needs_hosts,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed"),
]

APP = """
name: mlp
slo_ms: 1000
stages:
  - name: mlp
    model: model.py
    profile:
      latency_ms: {form: amdahl, gamma: 40, epsilon: 1, delta: 0, eta: 1}
      max_batch: 2
      max_cores: 2
system: {name: vertical-only, throughput: pure, margin: 0.9}
cluster: {nodes: [{hardware: local, count: 2, cores: 2}]}
"""
"""By its profile, a core serves some 25 requests per second; in truth the model only sleeps."""
FEW_RPS, MANY_RPS = 8, 40
HUGE = APP.replace("cores: 2}]", "cores: 64}]")
WATCH: Final = """
import json, ray, sys
answers, sys.stdout = sys.stdout, sys.stderr  # Ray prints there too
ray.init(log_to_driver=False)
for _ in sys.stdin:
    taken = ray.cluster_resources().get("CPU", 0) - ray.available_resources().get("CPU", 0)
    found = {
        "taken": taken,
        "actors": [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)],
        "alive": [each["NodeManagerAddress"] for each in ray.nodes() if each["Alive"]],
    }
    print(json.dumps(found), file=answers, flush=True)
"""


class RayFleet:
    """A Ray cluster of three hosts with two CPUs each, and a server whose cluster is two of them."""

    def __init__(self, hosts: Hosts, ray: RayCluster, folder: Path) -> None:
        self.hosts, self.ray = hosts, ray
        for name, text in (("model.py", MODEL), ("huge.yaml", HUGE)):
            (folder / name).write_text(text)
        self.fleet = Fleet(list(hosts), folder, APP, self.backend(ray.address), ray.env)
        self.watch()

    def watch(self) -> None:
        """Ask the cluster's head from now on, which was not there before or is another one."""
        self._watch = self.hosts[0].run(
            [sys.executable, "-c", WATCH],
            env=self.ray.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def backend(self, address: str) -> list[str]:
        return ["--backend", "ray", "--address", address]

    def restore(self) -> None:
        """Have the server running with one replica, and all of Ray's nodes."""
        missing = [host for host in self.hosts if host.address not in self.seen()["alive"]]
        self.ray.start_nodes(missing)
        server = self.fleet.server
        if server is None or server.poll() is not None:
            self.fleet.start_server()
        self.fleet.until_ready(1)

    def seen(self) -> dict[str, Any]:
        """What Ray says: how many CPUs are taken, names of actors, addresses of nodes."""
        assert self._watch.stdin
        assert self._watch.stdout
        self._watch.stdin.write(b"\n")
        self._watch.stdin.flush()
        found: dict[str, Any] = json.loads(self._watch.stdout.readline())
        return found

    def cores(self) -> float:
        """Those of the only replica."""
        (found,) = [each for _, each in self.fleet.replicas()]
        return float(found["cores"])

    def host_of_replica(self) -> Host:
        """Where the only replica runs."""
        (found,) = [host for host in self.hosts if workers(host)]
        return found

    def load(self, rate_rps: float = FEW_RPS) -> Load:
        return Load(self.fleet.address, "mlp", lambda x: 2 * x + 1, rate_rps=rate_rps)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayFleet]:
    with Hosts(3) as hosts, RayCluster(hosts, cpus=2) as ray:
        yield RayFleet(hosts, ray, tmp_path_factory.mktemp("ray"))


@pytest.fixture
def served(started: RayFleet) -> RayFleet:
    started.restore()
    return started


def test_nodes_are_taken_from_ray_as_a_whole_and_replicas_change_nothing_there(served: RayFleet) -> None:
    until(lambda: served.seen()["taken"] == 4, "two nodes of two cores")
    with served.load(MANY_RPS) as load:
        until(lambda: served.cores() == 2, "the replica grows")
        load.until_steady()
    load.check([200])
    with served.load() as load:
        until(lambda: served.cores() == 1, "it shrinks")
        load.until_steady(10)
    load.check([200])
    found = served.seen()
    assert (found["taken"], len(found["actors"])) == (4, 2)


def test_a_killed_agent_is_replaced_by_its_actor(served: RayFleet) -> None:
    fleet, host = served.fleet, served.host_of_replica()
    with served.load() as load:
        load.go_on(1)
        fault_s = time.monotonic()
        kill(running(host, "sloop.serve.cluster.agent"))
        until(lambda: "lost" in fleet.nodes().values(), "the node is lost")
        back_s = fleet.until_ready(1)
        load.until_steady(10)
        whole_s = until(lambda: set(fleet.nodes().values()) == {"ready"}, "another agent") + back_s
    tell(
        f"agent killed: {load.describe()}; only 200 after {load.disturbed_s(fault_s):.1f} s, another agent after "
        f"{whole_s:.1f} s; a cold start takes {fleet.cold_start_s():.1f} s"
    )
    load.check(CAUGHT)
    until(lambda: served.seen()["taken"] == 4, "two nodes")


def test_replicas_of_a_killed_node_of_ray_start_elsewhere(served: RayFleet) -> None:
    fleet = served.fleet
    if served.host_of_replica() is served.hosts[0]:  # beside the server
        kill(running(served.hosts[0], "sloop.serve.cluster.agent"))
        until(lambda: any(workers(host) for host in list(served.hosts)[1:]), "a replica elsewhere")
        fleet.until_ready(1)
        until(lambda: set(fleet.nodes().values()) == {"ready"}, "another agent")
    host = served.host_of_replica()
    with served.load() as load:
        load.go_on(1)
        fault_s = time.monotonic()
        host.kill()
        until(lambda: "lost" in fleet.nodes().values(), "the node is lost")
        fleet.until_ready(1)
        load.until_steady(10)
        until(lambda: set(fleet.nodes().values()) == {"ready"}, "an agent on the third node of Ray")
        whole_s = time.monotonic() - fault_s
    tell(
        f"a node of Ray killed: {load.describe()}; only 200 after {load.disturbed_s(fault_s):.1f} s, all nodes there "
        f"again after {whole_s:.1f} s; slowest answer {load.slowest_ms():.0f} ms; a cold start takes "
        f"{fleet.cold_start_s():.1f} s"
    )
    load.check(CAUGHT)
    until(lambda: served.seen()["taken"] == 4, "two nodes")


def test_nothing_is_left_in_ray_when_the_server_has_ended(served: RayFleet) -> None:
    assert served.fleet.server is not None
    began_s = time.monotonic()
    served.fleet.server.send_signal(signal.SIGINT)
    assert served.fleet.server.wait(WAIT_S) == 0, served.fleet.log()
    tell(f"the server ended after {time.monotonic() - began_s:.1f} s")
    until(lambda: [served.seen()[what] for what in ("taken", "actors")] == [0, []], "nothing taken, no actors")
    until(lambda: not any(running(host, "sloop.serve") for host in served.hosts), "no processes")


# What cannot be served


def ended(served: RayFleet, backend: list[str], **others: Any) -> tuple[str, float]:
    """What a server says that cannot start, and after how many seconds it has ended."""
    fleet, said = served.fleet, served.fleet.log()
    if fleet.server is not None and fleet.server.poll() is None:
        fleet.server.send_signal(signal.SIGINT)
        fleet.server.wait(WAIT_S)
    began_s = time.monotonic()
    server = fleet.start_server(backend, **others)
    assert server.wait(3 * WAIT_S) == 1
    return fleet.log()[len(said) :], time.monotonic() - began_s


def test_a_server_that_is_killed_is_followed_by_one_that_adopts_its_replicas(served: RayFleet) -> None:
    """If it can be found again: agents know its port and its token."""
    fleet, ray = served.fleet, served.ray
    lasting = [*served.backend(ray.address), "--agents-port", "9477"]
    assert fleet.server is not None
    fleet.server.send_signal(signal.SIGINT)
    fleet.server.wait(WAIT_S)
    fleet.start_server(lasting, env=ray.env)
    fleet.until_ready(1)
    before = workers(served.host_of_replica())
    fleet.server.kill()
    fleet.server.wait(WAIT_S)
    began_s = time.monotonic()
    fleet.start_server(lasting, env=ray.env)
    fleet.until_ready(1)
    tell(f"server killed, another one joins Ray: served again after {time.monotonic() - began_s:.1f} s")
    assert workers(served.host_of_replica()) == before, fleet.log()
    assert fleet.metric("sloop_replicas_adopted_total") == 1
    found = served.seen()
    assert (found["taken"], len(found["actors"])) == (4, 2)
    fleet.server.send_signal(signal.SIGINT)
    fleet.server.wait(WAIT_S)


def test_an_address_without_a_cluster_is_told(started: RayFleet) -> None:
    said, after_s = ended(started, started.backend(f"{started.hosts[0].address}:6399"))
    tell(f"no cluster there, after {after_s:.0f} s: {said}")
    assert "no Ray cluster can be joined at" in said
    assert "ray start --head" in said
    assert after_s < 2 * WAIT_S


@pytest.mark.parametrize("wrong", [{"RAY_AUTH_TOKEN": "0" * 64}, {"RAY_AUTH_MODE": "disabled"}])
def test_a_cluster_that_does_not_know_the_token_is_told(started: RayFleet, wrong: dict[str, str]) -> None:
    env = {**started.ray.env, "RAY_NUM_REDIS_GET_RETRIES": "3", **wrong}
    said, after_s = ended(started, started.backend(started.ray.address), env=env)
    tell(f"{wrong}, after {after_s:.0f} s: {said}")
    assert "RAY_AUTH_TOKEN" in said
    assert after_s < 2 * WAIT_S


def test_nodes_that_ray_cannot_have_are_told_and_the_server_can_be_stopped(started: RayFleet) -> None:
    fleet, said = started.fleet, len(started.fleet.log())
    if fleet.server is not None and fleet.server.poll() is None:
        fleet.server.send_signal(signal.SIGINT)
        fleet.server.wait(WAIT_S)
    server = fleet.start_server(app="huge.yaml")
    until(lambda: "no node of Ray has 64 CPU left for local-0" in fleet.log()[said:], "it is told")
    began_s = time.monotonic()
    server.send_signal(signal.SIGINT)
    server.wait(WAIT_S)
    tell(f"stopped during its start after {time.monotonic() - began_s:.1f} s: {fleet.log()[said:]}")
    assert server.returncode == 0


# The head dies


def test_serving_goes_on_without_the_head_until_nodes_give_up_and_another_head_is_joined(tmp_path: Path) -> None:
    """Without an external store, the nodes of a cluster end when they have been without their head for so long; Ray's
    default is 60 s. Until then everybody is served; then nobody is, until there is another head on the same address."""
    give_up_s = 5
    env = {"RAY_gcs_rpc_server_reconnect_timeout_s": str(give_up_s)}
    with Hosts(3) as hosts, RayCluster(hosts, cpus=2, env=env) as ray:
        served = RayFleet(hosts, ray, tmp_path)
        served.restore()
        fleet = served.fleet
        with served.load() as load:
            load.go_on(1)
            fault_s = time.monotonic()
            kill(running(hosts[0], "gcs_server"))
            until(lambda: set(fleet.nodes().values()) == {"lost"}, "all nodes are lost")
            lost_s = time.monotonic() - fault_s
            until(lambda: not any(running(host, "raylet") for host in hosts), "Ray's nodes have ended")
            ray.start_head()
            again_s = time.monotonic()
            until(lambda: len(fleet.ready()) == 1, "a replica on the new cluster")
            back_s = time.monotonic() - again_s
            load.until_steady(10)
        first_s = min(each.sent_s for each in load.asked if each.ends != [200]) - fault_s
        tell(
            f"head killed: {load.describe()}; everybody was served for {first_s:.1f} s, all nodes were lost after "
            f"{lost_s:.1f} s, a replica was ready {back_s:.1f} s after another head"
        )
        load.check((*CAUGHT, 500))
        assert first_s > give_up_s / 2
        assert "Ray was joined again" in fleet.log()


REDIS_PORT: Final = 6380


def has_rocksdb() -> bool:
    """Whether this version of Ray contains RocksDB."""
    found = find_spec("ray")
    assert found is not None
    assert found.origin is not None
    return "rocksdb" in Path(found.origin).parent.joinpath("_private", "node.py").read_text()


@pytest.fixture(params=["redis", "rocksdb"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RayFleet]:
    """A fleet whose Ray keeps its state in a store: Redis on another host than the head's, or RocksDB, which Ray
    contains, in a folder of the head. The head has no CPUs, as we recommend, and so no agent."""
    redis = shutil.which("redis-server") if request.param == "redis" else None
    if request.param == "redis" and redis is None:
        pytest.skip("redis-server is not installed")
    if request.param == "rocksdb" and not has_rocksdb():
        pytest.skip("this version of Ray has no RocksDB")
    with Hosts(3) as hosts:
        if redis is not None:
            options = ["--port", str(REDIS_PORT), "--bind", "0.0.0.0", "--protected-mode", "no", "--save", ""]
            hosts[1].run([redis, *options], cwd=tmp_path, stdout=subprocess.DEVNULL)
            env = {"RAY_REDIS_ADDRESS": f"{hosts[1].address}:{REDIS_PORT}"}
        else:
            env = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(tmp_path / "gcs")}
        with RayCluster(hosts, cpus=2, head_cpus=0, env=env) as ray:
            served = RayFleet(hosts, ray, tmp_path)
            served.restore()
            yield served


def test_with_a_store_nobody_notices_that_the_head_is_killed(kept: RayFleet) -> None:
    """Nodes, agents and replicas stay, and the next head knows them."""
    fleet = kept.fleet
    before = workers(kept.host_of_replica())
    with kept.load() as load:
        load.go_on(1)
        fault_s = time.monotonic()
        kept.ray.kill_head()
        load.go_on(3)
        kept.ray.start_head()
        head_s = time.monotonic() - fault_s
        kept.watch()
        until(lambda: len(kept.seen()["alive"]) == 3, "all nodes are known to the next head")
        nodes_s = time.monotonic() - fault_s
        until(lambda: "Ray was joined again" in fleet.log(), "the server has joined the next head")
        until(lambda: kept.seen()["taken"] == 4, "the nodes are taken")
        whole_s = time.monotonic() - fault_s
        load.until_steady(10)
    tell(
        f"head killed: {load.describe()}; slowest answer {load.slowest_ms():.0f} ms; another head after {head_s:.1f} "
        f"s, with all nodes after {nodes_s:.1f} s, with the server and its nodes after {whole_s:.1f} s"
    )
    load.check([200])
    assert "lost" not in fleet.nodes().values()
    assert workers(kept.host_of_replica()) == before
    with kept.load(MANY_RPS) as load:
        until(lambda: kept.cores() == 2, "the replica grows")
        load.until_steady()
    load.check([200])
    assert workers(kept.host_of_replica()) == before
