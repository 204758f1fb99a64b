"""A model file that several hosts fetch over shaped links, from a store and from each other. Figures are printed
(`pytest -s`)."""

import asyncio
import hashlib
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sloop.serve.network import NodeListener
from sloop.serve.weights.cache import WeightsCache
from sloop.serve.weights.peers import FileServer, PeerStore
from sloop.serve.weights.sources import ModelSource, Store
from tests.hosts import Host, Hosts, Process
from tests.serve.fleet import MODEL, Fleet, tell, until

pytestmark = [pytest.mark.live, pytest.mark.needs_hosts]

TOKEN = b"0123456789abcdef0123"
PORT, STORE_PORT = 9400, 8080
BITS_S = 100e6
SIZE = 12_500_000
"""One second on a link."""
HOSTS = 5


class Handler(BaseHTTPRequestHandler):
    """Sends one file, or the rest of it, with a strong version."""

    content = b""

    def do_GET(self) -> None:  # as its base calls it
        version = f'"{hashlib.md5(self.content).hexdigest()}"'
        start, end = 0, len(self.content)
        if not self.path.endswith("big.bin"):
            self.send_error(404)
        elif self.headers.get("If-None-Match") == version:
            self.send_response(304)
            self.end_headers()
        else:
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if asked:
                start, end = int(asked[1]), int(asked[2] or end - 1) + 1
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(self.content)}")
            else:
                self.send_response(200)
            self.send_header("ETag", version)
            self.send_header("Content-Length", str(end - start))
            self.end_headers()
            self.wfile.write(self.content[start:end])

    def log_message(self, *_: object) -> None:
        pass


async def receive(url: str, folder: str, host: str, begin_s: float, peers: Sequence[str]) -> None:
    """Fetch the file at a given time, say how long that took, and send it to others until the end of stdin."""
    cache, source = WeightsCache(Path(folder), 10**9), ModelSource.of(url)
    server = FileServer(lambda: [cache])
    await NodeListener.listen((host, PORT), TOKEN, server.accept)

    def nearer(store: Store) -> Store:
        return PeerStore(source, store, [(each, PORT) for each in peers], token=TOKEN, context=None)

    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.sleep(begin_s - time.time())
    path = await cache.fetch(source, nearer=nearer)
    took_s = time.time() - begin_s
    sys.stdout.write(json.dumps({"seconds": took_s, "sum": hashlib.sha256(path.read_bytes()).hexdigest()}) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "big.bin"
    path.write_bytes(random.Random(3).randbytes(SIZE))
    return path


@pytest.fixture(scope="module")
def hosts(content: Path) -> Iterator[Hosts]:
    with Hosts(HOSTS, BITS_S) as made:
        made[0].run([sys.executable, "-m", __name__, "store", str(content)])
        yield made


def receivers(hosts: Hosts, tmp_path: Path, peers: dict[int, list[int]]) -> dict[int, Process]:
    """Processes on these hosts, which begin at the same time to fetch the file, from these peers first."""
    begin_s = time.time() + 3
    url = f"http://{hosts[0].address}:{STORE_PORT}/big.bin"
    started = {}
    for number, before in peers.items():
        own = ["receive", url, str(tmp_path / str(number)), hosts[number].address, str(begin_s)]
        addresses = [hosts[each].address for each in before]
        started[number] = hosts[number].run(
            [sys.executable, "-m", __name__, *own, *addresses], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
    for process in started.values():
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
    return started


def results(started: dict[int, Process], content: Path) -> list[float]:
    """How long each took; all have the right file."""
    found = []
    for process in started.values():
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        assert said["sum"] == hashlib.sha256(content.read_bytes()).hexdigest()
        found.append(float(said["seconds"]))
    return found


def end(started: dict[int, Process]) -> None:
    for process in started.values():
        assert process.stdin is not None
        process.stdin.close()
        process.wait(20)


def sent_bytes(host: Host) -> int:
    """What has left a host, but for what it has sent to itself."""
    lines = [line.split() for line in host.output(["cat", "/proc/net/dev"]).splitlines()[2:]]
    return sum(int(line[9]) for line in lines if line[0] != "lo:")


CHAIN: dict[int, list[int]] = {1: [], 2: [1], 3: [2, 1], 4: [3, 2, 1]}


def test_a_chain_of_hosts_takes_hardly_longer_than_one_transfer(hosts: Hosts, tmp_path: Path, content: Path) -> None:
    took_s: dict[str, float] = {}
    nobody: dict[int, list[int]] = {each: [] for each in CHAIN}
    for name, peers in (("chain", CHAIN), ("store", nobody)):
        before = sent_bytes(hosts[0])
        started = receivers(hosts, tmp_path / name, peers)
        took_s[name] = max(results(started, content))
        end(started)
        copies = (sent_bytes(hosts[0]) - before) / SIZE
        assert copies < (1.2 if name == "chain" else 5), f"the store sent {copies:.2f} copies"
    ideal_s = 8 * SIZE / BITS_S
    tell(
        f"{SIZE / 1e6:g} MB to four hosts at {BITS_S / 1e6:g} Mbit/s: chain {took_s['chain'] / ideal_s:.2f} × the "
        f"ideal time, each from the store {took_s['store'] / took_s['chain']:.2f} × the chain"
    )


def test_when_a_host_of_the_chain_is_killed_the_others_have_the_file(
    hosts: Hosts, tmp_path: Path, content: Path
) -> None:
    started = receivers(hosts, tmp_path, CHAIN)

    def has_a_third() -> bool:
        return any(file.stat().st_size > SIZE // 3 for file in tmp_path.glob("3/*.part/files/*"))

    until(has_a_third, "a third of the file is on host 3")
    middle = started.pop(2)
    before = sent_bytes(hosts[0])
    middle.kill()
    took_s = results(started, content)
    end(started)
    again = (sent_bytes(hosts[0]) - before) / SIZE
    tell(f"one of four killed at a third: the others had the file after {max(took_s):.2f} s ({again:.2f} copies)")
    assert again < 1.2, "what had come was not sent again"


# Ordered by a server

SERVED = """
name: served
slo_ms: 5000
stages:
  - name: only
    model: {url}
    profile: {{latency_ms: {{form: quadratic, alpha: 0, beta: 0.1, gamma: 10}}, max_batch: 4}}
system: {{name: static, replicas: {replicas}, cores: {cores}, provision: cheapest_start}}
cluster: {{nodes: [{{hardware: local, count: {nodes}, cores: 1}}]}}
"""
MODEL_BYTES = 4_000_000


def served_on(hosts: Hosts, folder: Path, **others: float) -> Fleet:
    """A server beside a store, and an agent on each other host, all with caches in the memory of their hosts."""
    text = MODEL.encode() + b"#" * (MODEL_BYTES - len(MODEL.encode()))
    (folder / "model.py").write_bytes(text)
    hosts[0].run([sys.executable, "-m", "http.server", str(STORE_PORT), "--directory", str(folder)])
    url = f"http://{hosts[0].address}:{STORE_PORT}/model.py#sha256={hashlib.sha256(text).hexdigest()}"
    app = SERVED.format(url=url, nodes=len(hosts) - 1, **others)
    return Fleet(list(hosts), folder, app, env={"SLOOP_MODELS_CACHE": "/dev/shm/models"})


def start(fleet: Fleet) -> None:
    fleet.start_server()
    for number, host in enumerate(fleet.hosts[1:]):
        fleet.start_agent(f"local-{number}", host)


def test_a_burst_of_eight_starts_on_a_node_downloads_once(tmp_path: Path) -> None:
    """Flashpoint specification, acceptance check 9."""
    with Hosts(2) as hosts:
        fleet = served_on(hosts, tmp_path, replicas=8, cores=0.125)
        try:
            start(fleet)
            fleet.until_ready(8)
            copies = sent_bytes(hosts[0]) / MODEL_BYTES
        finally:
            fleet.stop()
    tell(f"eight replicas on one node: the store's host sent {copies:.2f} copies")
    assert 1 <= copies < 1.9, "with orders for eight workers"


def test_a_server_orders_a_chain_and_the_next_one_finds_what_nodes_have(tmp_path: Path) -> None:
    with Hosts(4) as hosts:
        fleet = served_on(hosts, tmp_path, replicas=3, cores=1)
        try:
            start(fleet)
            fleet.until_ready(3)
            copies = sent_bytes(hosts[0]) / MODEL_BYTES
            passed = sum(map(sent_bytes, list(hosts)[1:])) / MODEL_BYTES
            fleet.stop()
            before = sent_bytes(hosts[0])
            start(fleet)
            fleet.until_ready(3)
            again = (sent_bytes(hosts[0]) - before) / MODEL_BYTES
        finally:
            fleet.stop()
    tell(f"three nodes: the store sent {copies:.2f} copies, the nodes {passed:.2f}; for the next server {again:.2f}")
    assert 1 <= copies < 1.3
    assert 2 <= passed < 2.3
    assert again < 0.3


if __name__ == "__main__":
    if sys.argv[1] == "store":
        Handler.content = Path(sys.argv[2]).read_bytes()
        ThreadingHTTPServer(("", STORE_PORT), Handler).serve_forever()
    _, _, url_, folder_, host_, begin_, *peers_ = sys.argv
    asyncio.run(receive(url_, folder_, host_, float(begin_), peers_))
