"""A server in a control group of the kernel: what it takes for its machine, and what it does when that changes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import yaml
from click.testing import CliRunner

from sloop.cli import main
from sloop.demo.live import serving
from sloop.units import GIB
from tests.machines import RealMachine

pytestmark = [pytest.mark.live, pytest.mark.needs_hosts]


@pytest.fixture
def machine() -> Iterator[RealMachine]:
    try:
        made = RealMachine(f"sloop-test-{os.getpid()}")
    except OSError as error:
        pytest.skip(f"no control group with CPUs and memory can be made here: {error}")
    yield made
    made.remove()


def application(folder: Path, model: Path, **system: Any) -> Path:
    """One stage, whose replicas are believed to take 400 MB each."""
    profile = {
        "latency_ms": {"form": "table", "table": {1: {1: 8, 2: 5}}},
        **{"max_batch": 1, "max_cores": 2, "load_s": 1, "memory_bytes": 400_000_000, "origin": "assumed"},
    }
    stage = {"name": "only", "model": str(model), "profile": profile | {"source": "a test"}}
    file = folder / "app.yaml"
    file.write_text(yaml.safe_dump({"name": "app", "slo_ms": 500, "stages": [stage], "system": system}))
    return file


def seen(url: str) -> tuple[list[float], list[float]]:
    """The cores of nodes, and those of ready replicas, as the running server says."""
    with urlopen(f"{url}/v2/sloop/state", timeout=10) as answer:
        state = json.load(answer)
    replicas = [each for stage in state["applications"][0]["stages"] for each in stage["replicas"]]
    return [node["cores"] for node in state["nodes"]], [each["cores"] for each in replicas if each["life"] == "ready"]


def eventually(url: str, nodes: list[float], replicas: list[float]) -> None:
    until_s = time.monotonic() + 60
    while (last := seen(url)) != (nodes, replicas) and time.monotonic() < until_s:
        time.sleep(0.2)
    assert last == (nodes, replicas)


def test_a_machine_that_is_resized_while_it_serves(machine: RealMachine, tmp_path: Path, mlp: Path) -> None:
    machine.limit(cores=1.5, memory_bytes=2 * GIB)
    app = application(tmp_path, mlp, name="static", cores=0.5, replicas=3)
    with ExitStack() as stack:
        with machine.inside():
            assert CliRunner().invoke(main, ["check", str(app)]).exit_code == 0
            url = stack.enter_context(serving(app, tmp_path / "state")).http
        eventually(url, [1.5], [0.5, 0.5, 0.5])
        machine.limit(cores=0.6)
        eventually(url, [0.6], [0.2, 0.2, 0.2])
        machine.limit(cores=1.5)
        eventually(url, [1.5], [0.5, 0.5, 0.5])
        machine.limit(memory_bytes=900_000_000)
        eventually(url, [1.5], [0.5, 0.5])
        machine.limit(memory_bytes=2 * GIB)
        eventually(url, [1.5], [0.5, 0.5, 0.5])
    said = (tmp_path / "state" / "server.txt").read_text()
    assert "this machine has 0.6 cores and 2 GiB of memory now: limited to 0.6 cores by /sys/fs/cgroup/" in said
    replayed = CliRunner().invoke(main, ["replay", str(tmp_path / "state")])
    assert replayed.exit_code == 0, replayed.output


def test_what_does_not_fit_is_refused_with_the_file_of_the_limit(
    machine: RealMachine, tmp_path: Path, mlp: Path
) -> None:
    machine.limit(cores=1, memory_bytes=700_000_000)
    app = application(tmp_path, mlp, name="static", cores=0.25, replicas=3)
    with machine.inside():
        checked = CliRunner().invoke(main, ["check", str(app)])
    assert checked.exit_code == 1
    text = "".join(checked.output.split())
    assert f"limitedto0.652GiBofmemoryby{machine.folders[-1]}/memory." in text


READ_ONLY = """
set -e
mount --bind / /
mount -t tmpfs tmpfs /mnt
mkdir /mnt/models
mount --bind "$1" /mnt/models
mount -o remount,bind,ro /mnt/models
mount -t tmpfs -o mode=1777 tmpfs /tmp
for each in $(awk '$2 ~ /^.(sys.fs.cgroup|dev.shm|var.tmp)/ { print $2 }' /proc/self/mounts); do
    mount -o remount,bind,ro "$each"
done
mount -o remount,bind,ro /
cd /
shift
exec env -i PATH="$PATH" PYTHONPATH="$PYTHONPATH" PYTHONDONTWRITEBYTECODE=1 \\
    setpriv --bounding-set=-all --inh-caps=-all --no-new-privs $WHO "$@"
"""
"""A root that is read-only but for /tmp, no home, no locale, no rights, as in a pod of KServe."""
OTHER = "--reuid=543210 --regid=0 --clear-groups"


def who() -> str:
    """Options of setpriv(1) for a user without a name; for this one if another could not run this Python."""
    again = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import sloop.cli'], check=True)"
    command = ["setpriv", *OTHER.split(), sys.executable, "-c", again]
    done = subprocess.run(command, capture_output=True, check=False, env={**os.environ, "PYTHONPATH": PATHS})
    return OTHER if done.returncode == 0 else ""


PATHS = os.pathsep.join(filter(None, sys.path))


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv(1) of util-linux")
def test_a_folder_of_models_is_served_where_only_tmp_can_be_written(tmp_path: Path, mlp: Path) -> None:
    """Without a profile, home, locale or name of the user, in a folder that cannot be written."""
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "some.onnx").write_bytes(mlp.read_bytes())
    (folder / "some.onnx").chmod(0o644)
    folder.chmod(0o755)
    command = ["unshare", "--mount", "sh", "-c", READ_ONLY, "sh", str(folder), sys.executable, "-m", "sloop", "serve"]
    options = ["--name", "isvc", "--state", "/tmp/state", "--http-port", "0", "--grpc-port", "0", "--json"]
    with subprocess.Popen(
        [*command, "/mnt/models", *options],
        env={**os.environ, "PYTHONPATH": PATHS, "WHO": who()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline() or "{}")
        try:
            with urlopen(f"{said.get('http')}/v2/models/isvc", timeout=10) as answer:
                assert json.load(answer)["name"] == "isvc"
        finally:
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
            assert "http" in said, (said, errors)
    assert "this short profile is kept in /tmp/state/profiles/some.onnx." in errors
