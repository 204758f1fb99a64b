"""Hosts for tests: separate from each other, joined by a network that can be slow or broken, and gone afterwards."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from sloop.errors import MachineError
from tests import hosts as module
from tests.hosts import WAIT_S, Host, Hosts, Process, RayCluster, is_running

pytestmark = [pytest.mark.live, pytest.mark.needs_hosts]

PORT = 8000
ECHO = """
import os, socket, sys, threading
def answer(connection):
    while data := connection.recv(1 << 16): connection.sendall(data)
server = socket.create_server(("", 8000))
if len(sys.argv) > 1 and os.fork(): os.wait()
print("ready", flush=True)
while True: threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()
"""
SINK = """
import socket
server = socket.create_server(("", 8000))
print("ready", flush=True)
while True:
    connection, _ = server.accept()
    size = 0
    while data := connection.recv(1 << 16): size += len(data)
    connection.sendall(size.to_bytes(8, "big"))
"""
SOURCE = """
import socket
server = socket.create_server(("", 8000))
print("ready", flush=True)
while True:
    connection, _ = server.accept()
    connection.sendall(bytes(int.from_bytes(connection.recv(8), "big")))
    connection.close()
"""


def serve(host: Host, program: str, *arguments: str) -> Process:
    process = host.run([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE)
    assert process.stdout
    assert process.stdout.readline() == b"ready\n"
    return process


def connect(host: Host) -> socket.socket:
    return socket.create_connection((host.address, PORT), timeout=WAIT_S)


def echo(connection: socket.socket, text: bytes) -> bytes:
    connection.sendall(text)
    return connection.recv(100)


def hangs(connection: socket.socket) -> bool:
    """Nothing comes, neither data nor an end."""
    connection.settimeout(0.3)
    try:
        connection.recv(100)
    except TimeoutError:
        connection.settimeout(WAIT_S)
        return True
    return False


def wait_until(condition: Callable[[], bool]) -> bool:
    give_up = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture
def pair() -> Iterator[Hosts]:
    with Hosts(2) as hosts:
        yield hosts


def test_hosts_reach_each_other_and_the_test_reaches_them(pair: Hosts) -> None:
    one, two = pair
    serve(two, ECHO)
    assert one.within(socket.gethostname) == one.name
    assert one.within(lambda: socket.gethostbyname(two.name)) == two.address
    with one.within(lambda: connect(two)) as connection:
        assert connection.getsockname()[0] == one.address
        assert echo(connection, b"from host0") == b"from host0"
    with connect(two) as connection:
        assert connection.getsockname()[0] == pair.address
        assert echo(connection, b"from the test") == b"from the test"


def test_hosts_do_not_reach_the_outside_nor_each_others_loopback(pair: Hosts) -> None:
    one, two = pair
    serve(one, ECHO)
    with pytest.raises(OSError, match="unreachable"):
        one.within(lambda: socket.create_connection(("192.0.2.1", PORT), timeout=WAIT_S))
    with one.within(lambda: socket.create_connection(("127.0.0.1", PORT), timeout=WAIT_S)) as connection:
        assert echo(connection, b"here") == b"here"
    with pytest.raises(ConnectionRefusedError):
        two.within(lambda: socket.create_connection(("127.0.0.1", PORT), timeout=WAIT_S))


def test_hosts_share_neither_processes_nor_shared_memory(pair: Hosts) -> None:
    one, two = pair
    sleeping = one.run(["sleep", "1000"])
    assert one.pids() == [sleeping.pid]
    assert two.pids() == []
    one.within(lambda: Path("/dev/shm/note").write_text("of host0"))
    assert two.output(["ls", "/dev/shm"]) == ""
    assert "sleep" in one.output(["sh", "-c", "cat /proc/[0-9]*/comm"])
    assert "sleep" not in two.output(["sh", "-c", "cat /proc/[0-9]*/comm"])


def test_processes_get_environment_folder_and_streams(pair: Hosts, tmp_path: Path) -> None:
    (one, _) = pair
    assert one.output(["sh", "-c", "echo $COLOUR $HOME"], env={"COLOUR": "blue"}) == f"blue {os.environ['HOME']}\n"
    with one.run(["sh", "-c", "pwd; cat"], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.communicate(b"in")[0] == f"{tmp_path}\nin".encode()
    with pytest.raises(AssertionError, match=r"ended with 3.*\n.*broken"):
        one.output(["sh", "-c", "echo broken >&2; exit 3"])
    with pytest.raises(AssertionError, match="longer than"):
        one.output(["sleep", "1000"], timeout_s=0.01)
    with pytest.raises(FileNotFoundError):
        one.run(["no-such-program"])


@pytest.mark.parametrize("direction", ["to the host", "from the host"])
def test_bandwidth_is_what_was_asked_for(direction: str) -> None:
    size = 3_000_000
    with Hosts(1) as (host,):
        serve(host, SINK if direction == "to the host" else SOURCE)

        def seconds() -> float:
            began = time.monotonic()
            with connect(host) as connection:
                if direction == "to the host":
                    connection.sendall(bytes(size))
                    connection.shutdown(socket.SHUT_WR)
                    assert int.from_bytes(connection.recv(8), "big") == size
                else:
                    connection.sendall(size.to_bytes(8, "big"))
                    assert sum(len(data) for data in iter(lambda: connection.recv(1 << 16), b"")) == size
            return time.monotonic() - began

        unlimited = seconds()
        host.slow(80e6)
        fast = seconds()
        host.slow(20e6)
        slow = seconds()
        host.slow(None)
        host.slow(None)
        assert slow > 5 * unlimited
        assert 1.5 < slow / fast < 10  # 4 was asked for
        assert slow > 5 * seconds()


def test_bandwidth_is_limited_from_the_start() -> None:
    with Hosts(1, 1e6) as (host,):
        assert "rate 1Mbit" in host.output(["tc", "qdisc", "show", "dev", "eth0"])


def test_connections_share_a_fair_link_by_their_ports() -> None:
    """Each connection is counted by the class of its receiver's port; the link can be limited otherwise afterwards."""
    with Hosts(1) as (host,):
        serve(host, SOURCE)
        host.slow(50e6)
        host.slow(80e6, is_fair=True)
        with connect(host) as connection:
            connection.sendall((1_000_000).to_bytes(8, "big"))
            assert sum(len(data) for data in iter(lambda: connection.recv(1 << 16), b"")) == 1_000_000
            port = connection.getsockname()[1]
        shown = host.output(["tc", "-s", "class", "show", "dev", "eth0"])
        sent = {each.split()[1]: int(each.split("Sent ")[1].split()[0]) for each in shown.split("class ")[1:]}
        assert sent[f"1:{port % 64 + 1:x}"] > 1_000_000
        assert sum(size > 500_000 for size in sent.values()) == 2, "that class, and all together"
        host.slow(80e6, is_fair=True)
        host.slow(None)
        assert "htb" not in host.output(["tc", "qdisc", "show", "dev", "eth0"])


def test_cut_connections_hang_and_go_on_when_healed(pair: Hosts) -> None:
    one, two = pair
    serve(two, ECHO)
    with connect(two) as from_test, one.within(lambda: connect(two)) as from_one:
        assert echo(from_test, b"before") == echo(from_one, b"before") == b"before"
        two.cut()
        for connection in (from_test, from_one):
            connection.sendall(b"during")
            assert hangs(connection)
        with pytest.raises(TimeoutError):
            one.within(lambda: socket.create_connection((two.address, PORT), timeout=0.3))
        two.heal()
        assert from_test.recv(100) == from_one.recv(100) == b"during"


def test_one_cut_leaves_the_others_connected() -> None:
    with Hosts(3) as (one, two, three):
        serve(three, ECHO)
        one.cut()
        with two.within(lambda: connect(three)) as connection:
            assert echo(connection, b"there") == b"there"


def test_paused_processes_and_their_children_answer_after_resume(pair: Hosts) -> None:
    (one, two) = pair
    serve(one, ECHO, "in a child")
    serve(two, ECHO)
    with connect(one) as paused, connect(two) as other:
        assert echo(paused, b"before") == b"before"
        one.pause()
        paused.sendall(b"during")
        assert hangs(paused)
        assert echo(other, b"not paused") == b"not paused"
        one.resume()
        assert paused.recv(100) == b"during"


@pytest.mark.parametrize("pause_first", [False, True])
def test_kill_ends_all_processes_and_the_host_can_start_again(pair: Hosts, pause_first: bool) -> None:
    one, two = pair
    serve(two, ECHO)
    process = serve(one, ECHO, "in a child")
    one.output(["sh", "-c", "setsid sleep 1000 > /dev/null 2>&1 &"])
    assert len(one.pids()) == 3
    with connect(one) as connection, connect(two) as other:
        assert echo(connection, b"before") == b"before"
        if pause_first:
            one.pause()
        one.kill()
        assert connection.recv(100) == b""
        assert echo(other, b"not killed") == b"not killed"
    assert one.pids() == []
    assert process.returncode == -signal.SIGKILL
    serve(one, ECHO)
    with connect(one) as connection:
        assert echo(connection, b"again") == b"again"


def is_there(device: str) -> bool:
    return Path("/sys/class/net", device).exists()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_remains_after_an_exception(error: type[BaseException]) -> None:
    with contextlib.suppress(error), Hosts(2) as hosts:
        process = hosts[0].run(["sleep", "1000"])
        firsts = [hosts[1]._first.pid, hosts[1]._first_pid]
        assert is_there(hosts.device)
        raise error
    assert process.returncode == -signal.SIGKILL
    assert not any(map(is_running, firsts))
    assert not is_there(hosts.device)


def test_nothing_remains_when_building_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_interface", lambda *_: ["link set nothing up"])
    hosts = Hosts(2)
    with pytest.raises(MachineError, match="nothing"):
        hosts.__enter__()
    assert len(hosts) == 0
    assert not is_there(hosts.device)


ENDS = {"returns": "", "raises": "raise ValueError", "is killed": "os.kill(os.getpid(), 9)", "exits": "os._exit(0)"}


@pytest.mark.parametrize("end", ENDS)
def test_nothing_remains_of_a_process_that(end: str, pair: Hosts) -> None:
    program = f"""
import os, subprocess, sys
from tests.hosts import Hosts
hosts = Hosts(1).__enter__()
subprocess.run(["true"])
process = hosts[0].run(["sh", "-c", "sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE)
process.stdout.readline()
print(hosts.device, *hosts[0].pids(), flush=True)
{ENDS[end]}
"""
    kept = pair[0].run(["sleep", "1000"])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    device, *pids = done.stdout.split()
    assert len(pids) == 2, done.stderr
    assert wait_until(lambda: not is_there(device) and not any(is_running(int(pid)) for pid in pids))
    assert kept.poll() is None
    assert is_there(pair.device)


def test_two_networks_at_the_same_time_do_not_reach_each_other(pair: Hosts) -> None:
    with Hosts(1) as (other,):
        serve(other, ECHO)
        serve(pair[0], ECHO)
        for host in (other, pair[0]):
            with connect(host) as connection:
                assert echo(connection, b"each") == b"each"
        with pytest.raises(OSError, match="unreachable"):
            pair[0].within(lambda: connect(other))
    assert is_there(pair.device)


def test_the_reason_is_the_missing_program_or_right(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = module.why_no_hosts.__wrapped__
    assert tried() == ""
    with monkeypatch.context() as patch:
        patch.setattr(module, "PROGRAMS", ("ip", "no-such-program"))
        assert tried() == "no hosts: no-such-program not installed"
    monkeypatch.setattr(module, "_new_namespaces", refused)
    assert "not permitted" in tried()


def refused(*_: object) -> Process:
    """unshare(1) where it has no rights."""
    script = "echo 'unshare failed: Operation not permitted' >&2"
    return subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


PINNED = """
import json, ray, sys, time
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
answers, sys.stdout = sys.stdout, sys.stderr  # Ray prints there too
ray.init(log_to_driver=False)
@ray.remote
def address():
    return ray.util.get_node_ip_address()
def addresses(alive):
    return {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"] == alive}
pinned = {where: NodeAffinitySchedulingStrategy(node, soft=False) for where, node in addresses(True).items()}
tasks = {where: address.options(scheduling_strategy=pin).remote() for where, pin in pinned.items()}
print(json.dumps({where: ray.get(task) for where, task in tasks.items()}), file=answers, flush=True)
while not addresses(False):
    time.sleep(0.05)
print(json.dumps([*addresses(False)]), file=answers)
"""


@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
@pytest.mark.timeout(600)
def test_ray_runs_tasks_on_each_host_and_sees_a_killed_one() -> None:
    with Hosts(3) as hosts, RayCluster(hosts) as ray:
        driver = ray.run(PINNED)
        assert driver.stdout
        assert json.loads(driver.stdout.readline()) == {host.address: host.address for host in hosts}
        hosts[2].kill()
        assert json.loads(driver.stdout.read()) == [hosts[2].address]
