"""Separate hosts on one machine, for tests of what happens only between hosts.

Each host has namespaces of its own for network, processes, host name, mounts and IPC: it shares neither loopback,
ports, shared memory nor process ids (so no `/proc/PID/fd`) with another, only the file system outside /dev/shm. All
hosts and the test itself are connected to one switch, a bridge in a namespace of its own, and to nothing else.

Namespaces have no name that could remain: the kernel removes a host with all its processes as soon as the process that
built it has ended, however it ended. Linux only; needs the rights of root. Tests have the marker `needs_hosts`.
"""

import atexit
import contextlib
import ctypes
import fcntl
import functools
import ipaddress
import itertools
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import IO, Any, Final, Self, TypeVar

from sloop.errors import MachineError
from sloop.machine import own_group
from sloop.serve.cpu_quota import PREFIX, remove_tree

T = TypeVar("T")
Stream = int | IO[Any] | None
Process = subprocess.Popen[bytes]

WAIT_S: Final = 60
QUEUE_S: Final = 0.1
"""Of a limited link: how long what waits in it takes at most."""
FAIR_QUEUE_S: Final = 0.05
"""The same for the queue of some connections."""
CLASSES: Final = 64
FAIR_BYTES: Final = 64_000
"""What a queue sends in its turn: the largest packet, as the kernel hands it over."""
"""At most, for what normally takes milliseconds: machines differ."""
PROGRAMS: Final = ("ip", "bridge", "tc", "unshare", "nsenter", "mount")
KINDS: Final = {"net": "--net", "uts": "--uts", "ipc": "--ipc", "pid_for_children": "--pid", "mnt": "--mount-proc"}
"""Namespaces of a host: names in /proc/PID/ns, in the order in which they are entered, and options of unshare(1)."""
CLONE_FS: Final = 0x200
HEALTH: Final = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "3",
}
"""Ray's head takes a killed node for dead after 3 s instead of 15 s, and one that hangs after about 18 s."""

_libc: Final = ctypes.CDLL(None, use_errno=True)
_counter: Final = itertools.count()


def _system_call(name: str, *arguments: int) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _configure(program: str, lines: Sequence[str], network_of: int | None = None) -> None:
    """Runs lines of `ip`, `bridge` or `tc` in the network namespace of a process. MachineError if one is refused."""
    within = [] if network_of is None else ["nsenter", f"--net=/proc/{network_of}/ns/net"]
    argv, text = [*within, program, "-batch", "-"], "\n".join(lines) + "\n"
    done = subprocess.run(argv, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise MachineError(f"{program} failed: {done.stderr.strip()}\n{text}", help="needs root")


def is_running(pid: int) -> bool:
    """Whether there is such a process, and not only what its parent still has to read."""
    return _state(f"/proc/{pid}") not in "ZX"


def _is_stopped(pid: int) -> bool:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return True
    return all(_state(f"/proc/{pid}/task/{thread}") in "TtZX" for thread in threads)


def _state(folder: str) -> str:
    """The letter of proc_pid_stat(5)."""
    try:
        return Path(folder, "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _new_namespaces(options: Sequence[str], setup: str = "") -> Process:
    """Starts unshare(1) with a first process inside, which runs `setup`, lines of sh(1), and says when it is ready. It
    ignores SIGCHLD, so that the kernel reaps what it inherits, and lives until this process has ended."""
    script = f"set -e\n{setup}\necho ready\nexec env --ignore-signal=CHLD cat > /dev/null"
    return subprocess.Popen(
        ["unshare", *options, "sh", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C ends the test, which then ends its hosts
    )


def _wait_ready(first: Process) -> None:
    assert first.stdout
    assert first.stderr
    if first.stdout.readline() != b"ready\n":
        raise MachineError(f"cannot make namespaces: {first.stderr.read().decode().strip()}", help="needs root")


class Host:
    """One host. Processes that `run` starts are in it with all their descendants."""

    def __init__(self, number: int, name: str, address: str, setup: str) -> None:
        self.number, self.name, self.address = number, name, address
        self._first = _new_namespaces([*KINDS.values(), "--fork", "--kill-child"], setup)
        self._first_pid = 0
        self._switch_pid = 0
        self._groups = ""
        """What the control groups are called that its agents have made."""
        self._shaped = False
        self._started: list[Process] = []

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: Stream = subprocess.DEVNULL,
        stdout: Stream = None,
        stderr: Stream = None,
    ) -> Process:
        """Starts a process in a session of its own. `env` is added to the environment of the test."""
        environment, folder = {**os.environ, **(env or {})}, cwd or Path.cwd()
        process = self.within(
            lambda: subprocess.Popen(
                argv, env=environment, cwd=folder, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True
            )
        )
        self._started.append(process)
        return process

    def output(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, timeout_s: float = WAIT_S) -> str:
        """Runs a process to its end and returns its stdout. AssertionError with its stderr if it fails."""
        with self.run(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            try:
                out, err = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired as late:
                process.kill()
                raise AssertionError(
                    f"{argv} took longer than {timeout_s} s: {late.output!r} {late.stderr!r}"
                ) from None
        assert process.returncode == 0, f"{argv} ended with {process.returncode}: {out.decode()}\n{err.decode()}"
        return out.decode()

    def within(self, call: Callable[[], T]) -> T:
        """What `call` returns in a thread inside this host. Sockets made there belong to the host, and processes
        started there run in it. The thread's working directory is /, and it cannot start threads."""

        def entered() -> T:
            namespaces = [os.open(f"/proc/{self._first.pid}/ns/{kind}", os.O_RDONLY) for kind in KINDS]
            try:
                _system_call("unshare", CLONE_FS)  # a thread that shares its working directory cannot change mounts
                for namespace in namespaces:
                    _system_call("setns", namespace, 0)
            finally:
                for namespace in namespaces:
                    os.close(namespace)
            return call()

        with ThreadPoolExecutor(1) as executor:
            return executor.submit(entered).result()

    def pids(self) -> list[int]:
        """All its processes that have not ended, as the test sees their ids."""
        inside, found = os.readlink(f"/proc/{self._first.pid}/ns/pid_for_children"), []
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with contextlib.suppress(OSError):  # it is gone
                if os.readlink(f"/proc/{pid}/ns/pid") == inside and pid != self._first_pid and is_running(pid):
                    found.append(pid)
        return found

    def pause(self) -> None:
        """Stops all its processes where they are; the network still acknowledges what arrives for them."""
        paused: set[int] = set()
        give_up = time.monotonic() + WAIT_S
        while new := set(self.pids()) - paused:  # until none has started another meanwhile
            self._signal(new, signal.SIGSTOP)
            while not all(map(_is_stopped, new)):  # a thread runs on until another one has taken the signal
                assert time.monotonic() < give_up, f"{self.name}: processes {new} do not stop"
                time.sleep(0.001)
            paused |= new

    def resume(self) -> None:
        self._signal(self.pids(), signal.SIGCONT)

    def kill(self) -> None:
        """Ends all its processes with SIGKILL; their peers see connections closed. The host remains, and `run` starts
        anew. A host that loses its power: `cut`, then `kill`."""
        give_up = time.monotonic() + WAIT_S
        while pids := self.pids():
            assert time.monotonic() < give_up, f"{self.name}: processes {pids} do not end"
            self._signal(pids, signal.SIGKILL)
            time.sleep(0.001)
        for process in self._started:
            process.wait(WAIT_S)

    def cut(self) -> None:
        """The switch drops whatever comes from and to this host: connections hang, old and new ones alike."""
        self._set_forwarding(False)

    def heal(self) -> None:
        """Undoes `cut`. What TCP held back comes with its next retransmission."""
        self._set_forwarding(True)

    def slow(self, bits_per_s: float | None, *, is_fair: bool = False) -> None:
        """Limits what it sends, and what it receives, to so many bits per second each; None for no limit. With
        `is_fair`, its connections share equally what it sends: those behind a common queue may stay unequal for as long
        as a model takes."""
        places = (("eth0", self._first.pid), (f"port{self.number}", self._switch_pid))
        for device, pid in places:
            lines = [f"qdisc del dev {device} root"] if self._shaped else []
            if bits_per_s is not None:
                lines += (_share if is_fair and device == "eth0" else _shape)(device, bits_per_s)
            _configure("tc", lines, pid)
        self._shaped = bits_per_s is not None

    def _set_forwarding(self, forwarding: bool) -> None:
        state = 3 if forwarding else 0  # states of bridge ports: forwarding, disabled
        _configure("bridge", [f"link set dev port{self.number} state {state}"], self._switch_pid)

    def _signal(self, pids: Sequence[int] | set[int], number: signal.Signals) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _connect(self, switch_pid: int, network: Sequence[str]) -> None:
        """After the switch has a port for this host. `network`: lines of `ip`."""
        self._switch_pid = switch_pid
        (self._first_pid,) = self.pids()
        self._groups = f"{PREFIX}{os.stat(f'/proc/{self._first_pid}/ns/pid').st_ino}-*"
        _configure("ip", network, self._first.pid)

    def _end(self) -> None:
        """Ends the first process of the namespace, so all others of it."""
        self._signal([self._first_pid or self._first.pid], signal.SIGKILL)
        for process in (*self._started, self._first):  # the first one ends after all others have been reaped
            process.wait(WAIT_S)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        for version in (1, 2) if self._groups else ():  # a server that was killed has left its own
            with contextlib.suppress(OSError):
                for folder in own_group(Path("/proc"), version).glob(self._groups):
                    remove_tree(folder)


def _shape(device: str, bits_per_s: float) -> list[str]:
    """Lines of tc(8): the token bucket holds 5 ms or one full segment, the queue before it 100 ms."""
    burst, limit = max(16_000, int(bits_per_s / 8 * 0.005)), max(64_000, int(bits_per_s / 8 * QUEUE_S))
    return [f"qdisc replace dev {device} root tbf rate {int(bits_per_s)}bit burst {burst} limit {limit}"]


def _share(device: str, bits_per_s: float) -> list[str]:
    """Lines of tc(8): a queue for each of 64 classes of connections, by the receiver's port; those that have something
    to send share the rate. It stands in for fq_codel, which hosts usually have and not every kernel."""
    rate, limit, mask = int(bits_per_s), max(64_000, int(bits_per_s / 8 * FAIR_QUEUE_S)), f"{CLASSES - 1:#06x}"
    burst = max(16_000, int(bits_per_s / 8 * 0.005))
    lines = [
        f"qdisc replace dev {device} root handle 1: htb default 1",
        f"class replace dev {device} parent 1: classid 1:ffff htb rate {rate}bit burst {burst}",
    ]
    for number in range(CLASSES):
        each = f"{number + 1:x}"
        share = f"rate {rate // CLASSES}bit ceil {rate}bit cburst {burst} quantum {FAIR_BYTES}"
        lines += [
            f"class replace dev {device} parent 1:ffff classid 1:{each} htb {share}",
            f"qdisc replace dev {device} parent 1:{each} bfifo limit {limit}",
            f"filter add dev {device} parent 1: protocol ip u32 match ip dport {number} {mask} flowid 1:{each}",
        ]
    return lines


class Hosts:
    """Builds so many hosts, with addresses in a network of their own. `with Hosts(2) as (one, two):`"""

    def __init__(self, count: int, bits_per_s: float | None = None) -> None:
        """`bits_per_s`: what each host sends, and receives, at most; None for no limit."""
        self._count, self._bits_per_s = count, bits_per_s
        self._hosts: list[Host] = []
        self._switch: Process | None = None
        self.device = f"sl{os.getpid()}n{next(_counter)}"
        """The test's own interface to the switch."""
        self.address = ""
        """The test's own address in the network of the hosts."""

    def __enter__(self) -> Self:
        atexit.register(self.close)
        try:
            with _building():
                self._build(_free_network())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def __len__(self) -> int:
        return len(self._hosts)

    def __getitem__(self, number: int) -> Host:
        return self._hosts[number]

    def close(self) -> None:
        """Ends all processes of all hosts, then the hosts. A second call does nothing."""
        atexit.unregister(self.close)
        for host in self._hosts:
            host._end()
        self._hosts.clear()
        if self._switch is not None:
            with self._switch:
                self._switch.kill()
            self._switch = None
            # The kernel removes the interface after the switch; the next hosts shall not find its network taken.
            subprocess.run(["ip", "link", "delete", self.device], capture_output=True, check=False)

    def _build(self, network: IPv4Network) -> None:
        self.address = str(network[1])
        addresses = [network[10 + number] for number in range(self._count)]
        names = "".join(f"{address} host{number}\n" for number, address in enumerate(addresses))
        self._switch = _new_namespaces(["--net"])
        for number, address in enumerate(addresses):
            self._hosts.append(Host(number, f"host{number}", str(address), _setup(f"host{number}", names)))
        for first in (self._switch, *(host._first for host in self._hosts)):
            _wait_ready(first)
        self._connect([network[1], *addresses])
        for host in self._hosts:
            host.slow(self._bits_per_s)

    def _connect(self, addresses: Sequence[IPv4Address]) -> None:
        """Of the test, then of the hosts."""
        assert self._switch
        switch = self._switch.pid
        ports = [f"port{host.number}" for host in self._hosts]
        own = f"link add {self.device} address {_mac(addresses[0])} type veth peer name uplink netns {switch}"
        cables = [
            f"link add {port} netns {switch} type veth peer name eth0 address {_mac(address)} netns {host._first.pid}"
            for host, port, address in zip(self._hosts, ports, addresses[1:], strict=True)
        ]
        _configure("ip", [own, *cables, *_interface(self.device, addresses[0], addresses)])
        plugged = [f"link set {port} master switch up" for port in ("uplink", *ports)]
        _configure("ip", ["link add switch type bridge", "link set switch up", *plugged], switch)
        for host, address in zip(self._hosts, addresses[1:], strict=True):
            host._connect(switch, ["link set lo up", *_interface("eth0", address, addresses)])


def _setup(name: str, names: str) -> str:
    """Lines of sh(1) that give a host its name, the names of all hosts, and shared memory of its own."""
    return f"""
        echo {name} > /proc/sys/kernel/hostname
        mount -t tmpfs tmpfs /dev/shm
        printf '%s' '127.0.0.1 localhost\n{names}' > /dev/shm/.hosts
        mount --bind /dev/shm/.hosts /etc/hosts
    """


def _mac(address: IPv4Address) -> str:
    return f"02:00:00:00:00:{int(address) % 256:02x}"


def _interface(device: str, address: IPv4Address, everyone: Sequence[IPv4Address]) -> list[str]:
    """Lines of ip(8). The neighbours are known for ever: with ARP, a peer that does not answer would soon be reported
    as unreachable, whereas packets to a peer behind a router are lost silently."""
    known = [f"neigh replace {each} lladdr {_mac(each)} dev {device} nud permanent" for each in everyone]
    return [
        f"link set {device} addrgenmode none",  # no IPv6
        f"addr add {address}/24 dev {device}",
        f"link set {device} up",
        *(line for line, each in zip(known, everyone, strict=True) if each != address),
    ]


@contextlib.contextmanager
def _building() -> Iterator[None]:
    """One process at a time chooses a network and takes it."""
    with (Path(tempfile.gettempdir()) / "sloop-test-hosts.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _free_network() -> IPv4Network:
    """A network 10.x.y.0/24 to which this machine has no route yet, but for one to 10.0.0.0/8 or larger."""
    argv = ["ip", "-json", "-4", "route", "show", "table", "all"]
    routes = json.loads(subprocess.run(argv, capture_output=True, check=True).stdout or "[]")
    taken = [ipaddress.IPv4Network(route["dst"]) for route in routes if route["dst"] != "default"]
    taken = [network for network in taken if network.prefixlen > 8]
    for number in range(os.getpid(), os.getpid() + 0x10000):
        network = IPv4Network((10 << 24 | number % 0x10000 << 8, 24))
        if not any(network.overlaps(other) for other in taken):
            return network
    raise MachineError("no free network in 10.0.0.0/8", help="remove routes")


@functools.cache
def why_no_hosts() -> str:
    """Why this machine cannot build hosts; empty if it can. Tries it once."""
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        return f"no hosts: {', '.join(missing)} not installed"
    try:
        with Hosts(1, 1e9) as (host,):
            host.cut()
            host.output(["true"])
    except (MachineError, OSError, AssertionError) as error:
        return f"no hosts: {str(error).splitlines()[0]}"
    return ""


class RayCluster:
    """Ray on hosts: the head in the first, one node in each other. `with Hosts(3) as hosts, RayCluster(hosts) as ray:`

    Ray prints messages about nodes to the driver's `sys.stdout` even with `log_to_driver=False`."""

    PORT: Final = 6379
    FOLDER: Final = "/dev/shm/ray"
    """Of sockets and logs, in each host its own; ends with the host. Short, for paths of sockets have 107 bytes."""

    def __init__(
        self,
        hosts: Hosts,
        *,
        cpus: int = 1,
        head_cpus: int | None = None,
        object_store_bytes: int = 100_000_000,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """`cpus` and `object_store_bytes`: of each node; `head_cpus`: if the head has others. `env`: added to the
        environment of every Ray process."""
        self._hosts = hosts
        self.address = f"{hosts[0].address}:{self.PORT}"
        self._options = [f"--temp-dir={self.FOLDER}", f"--object-store-memory={object_store_bytes}"]
        self._cpus = cpus
        self._head_cpus = cpus if head_cpus is None else head_cpus
        self._options += ["--disable-usage-stats", "--include-log-monitor=false"]
        self._env = {**HEALTH, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), **(env or {})}
        self.env = {**self._env, "RAY_ADDRESS": self.address}
        """Of drivers: with it, `ray.init()` finds the cluster, if the driver runs in one of the hosts."""

    def __enter__(self) -> Self:
        self.start_head()
        self.start_nodes(list(self._hosts)[1:])
        return self

    def __exit__(self, *_: object) -> None:
        """Ends all processes of all hosts, those of drivers too."""
        for host in self._hosts:
            host.kill()

    def start_head(self) -> None:
        """Starts the head in the first host, which has none (any more). Without a store it knows nothing of what was
        before."""
        head = ["--head", f"--port={self.PORT}", "--include-dashboard=false", "--no-monitor"]
        head += [f"--num-cpus={self._head_cpus}"]
        self._wait([self._start(self._hosts[0], head)])

    def start_nodes(self, hosts: Sequence[Host]) -> None:
        """Starts a node in each of these hosts, which has none (any more), and waits until the head knows them."""
        options = [f"--address={self.address}", f"--num-cpus={self._cpus}"]
        self._wait([self._start(host, options) for host in hosts])

    def kill_head(self) -> None:
        """Ends all of Ray's processes in the first host, but not the drivers there."""
        for pid in self._hosts[0].pids():
            with contextlib.suppress(OSError):
                if b"/ray/" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)

    def run(self, program: str, *arguments: str, host: Host | None = None) -> Process:
        """Starts Python code as a driver, in the first host if none is given. Its stdout is a pipe."""
        argv = [sys.executable, "-c", program, *arguments]
        return (host or self._hosts[0]).run(argv, env=self.env, stdout=subprocess.PIPE)

    def output(self, program: str, *arguments: str, timeout_s: float = WAIT_S) -> str:
        """Runs Python code as a driver in the first host to its end and returns its stdout."""
        return self._hosts[0].output([sys.executable, "-c", program, *arguments], env=self.env, timeout_s=timeout_s)

    def _start(self, host: Host, options: Sequence[str]) -> Process:
        argv = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={host.address}"]
        argv += [*options, *self._options]
        return host.run(argv, env=self._env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def _wait(self, starting: Sequence[Process]) -> None:
        """`ray start` ends when the head knows the node, and leaves the node's processes behind."""
        for process in starting:
            out, _ = process.communicate(timeout=2 * WAIT_S)
            assert process.returncode == 0, f"Ray does not start: {out.decode()}"
