"""The commands that work on this machine: `sloop serve`, `load`, `profile` and `demo`."""

import ctypes
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from urllib.request import urlopen

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from sloop.app.application import Deployment
from sloop.app.limits import ServerLimits
from sloop.cli import main
from sloop.cli import profile as module
from sloop.cli import serve as serving
from sloop.errors import MachineError
from sloop.profile.fit import fit_all
from sloop.profile.profile import LatencyTable, Pass, Profile, Sample, load_profile
from sloop.serve.cluster.agents import NodeSettings
from sloop.serve.network import NodeTls
from sloop.serve.processes import spawn
from sloop.serve.server import Settings
from tests import joining
from tests.cli.conftest import APPLICATION, SERVED
from tests.cli.test_command import SOLVERS_AND_PLOTS
from tests.serve.edge.test_attacks import make_certificate
from tests.systems.test_replay import logged

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    grpc_client: ModuleType = pytest.importorskip("tritonclient.grpc")


@pytest.mark.live
def test_it_says_where_it_listens_and_leaves_when_told(server: "subprocess.Popen[str]", model: Path) -> None:
    assert server.stdout is not None
    where = json.loads(server.stdout.readline())
    assert where["application"] == "tiny"
    with urlopen(f"{where['http']}/v2/health/live") as answer:
        assert answer.status == 200
    server.send_signal(signal.SIGTERM)
    rest, said = server.communicate(timeout=30)
    assert (server.returncode, rest) == (0, ""), said
    assert (model.parent / where["log"]).exists()
    (limits,) = [line for line in said.splitlines() if "cores of replicas are limited by" in line]
    assert "cgroup v" in limits or "affinity" in limits


@pytest.mark.live
@pytest.mark.parametrize(
    ("host", "edges", "shown"), [("[::1]", "1", "[::1]"), ("::1", "2", "[::1]"), ("::", "2", "[::]")]
)
def test_an_address_of_ipv6_is_taken_and_shown_as_urls_have_it(model: Path, host: str, edges: str, shown: str) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    (model.parent / "tiny.yaml").write_text(SERVED)
    ports = ["--http-port", "0", "--grpc-port", "0", "--json"]
    command = [sys.executable, "-m", "sloop", "serve", "tiny.yaml", "--host", host, "--edges", edges, *ports]
    with subprocess.Popen(command, cwd=model.parent, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            where = json.loads(server.stdout.readline())
            assert where["http"].startswith(f"http://{shown}:")
            assert where["grpc"].startswith(f"{shown}:")
            web, grpc = (where[which].replace("[::]", "[::1]") for which in ("http", "grpc"))
            trace = ["--trace", "{kind: equal, rate: 20}", "--duration-s", "0.5", "--slo-ms", "20000"]
            result = CliRunner().invoke(main, ["load", web, *trace, "--json"])
            assert result.exit_code == 0, result.output
            assert json.loads(result.stdout)["ok"] == 10
            with grpc_client.InferenceServerClient(grpc) as client:
                assert client.is_server_live()
            with urlopen(f"{web}/v2/sloop/state") as answer:
                edges_shown = json.loads(answer.read())["edges"]
            shown_web, shown_rpc = edges_shown[0]["address"], edges_shown[-1]["grpc_address"]
            assert [f"http://{shown_web}", shown_rpc] == [where["http"], where["grpc"]]
            if host == "::":
                with urlopen(web.replace("[::1]", "127.0.0.1") + "/v2/health/live") as answer:
                    assert answer.status == 200
        finally:
            server.send_signal(signal.SIGINT)


SLOW_IMPORT = """
import sys, time

class Slow:
    def find_spec(self, name, *_):
        if name == "sloop.cli.serve":
            print("importing", flush=True)
            time.sleep(60)

sys.meta_path.insert(0, Slow())
from sloop.cli import main
main(["serve", "app.yaml"])
"""


@pytest.mark.live
def test_the_first_process_of_a_container_leaves_when_told_while_it_is_still_being_imported() -> None:
    """The kernel drops what such a process has no handler for."""
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", SLOW_IMPORT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as outer:
        assert outer.stdout is not None
        if not outer.stdout.readline():
            pytest.skip("this machine lets nobody make a namespace of processes")
        [first] = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
        os.kill(int(first), signal.SIGTERM)
        try:
            assert outer.wait(30) == 128 + signal.SIGTERM
        finally:
            outer.kill()


@pytest.mark.live
def test_it_leaves_when_told_while_it_still_waits_for_nodes(model: Path) -> None:
    (model.parent / "tiny.yaml").write_text(SERVED + "cluster: {nodes: [{hardware: local, count: 1, cores: 1}]}\n")
    nodes = "--backend ray --address 127.0.0.1 --http-port 0 --grpc-port 0"
    command = [sys.executable, joining.__file__, "serve", "tiny.yaml", *nodes.split()]
    with subprocess.Popen(command, cwd=model.parent, stderr=subprocess.PIPE, text=True) as waiting:
        assert waiting.stderr is not None
        assert next(line for line in waiting.stderr if "waiting for the agents of local-0" in line)
        waiting.send_signal(signal.SIGHUP)
        waiting.send_signal(signal.SIGTERM)
        assert waiting.wait(30) == 0  # agents have two minutes to come
        assert "stopping before the start is over" in waiting.stderr.read()


def test_an_application_without_models_is_refused(app: Path) -> None:
    result = CliRunner().invoke(main, ["serve", str(app)])
    assert result.exit_code == 1
    assert "has no model" in result.stderr


def served_limits(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> ServerLimits:
    """The limits with which `sloop serve` would serve."""
    seen: list[Deployment] = []
    monkeypatch.setattr(serving, "serve_until_stopped", lambda deployment, *_, **__: seen.append(deployment))
    result = CliRunner().invoke(main, ["serve", *arguments])
    assert result.exit_code == 0, result.stderr
    return seen[0].limits


def test_limits_come_from_the_deployment_a_file_or_a_mapping(
    app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert served_limits(monkeypatch, str(app)) == ServerLimits()
    file = tmp_path / "limits.yaml"
    file.write_text("{head_s: 3, connections: 60, log_bytes: 0}")
    assert served_limits(monkeypatch, str(app), "--limits", str(file)) == ServerLimits(
        head_s=3, connections=60, log_bytes=0
    )
    shop = tmp_path / "shop.yaml"
    shop.write_text(f"name: shop\napplications: [{app.name}]\nlimits: {{head_s: 5, rows: 7, bytes: 1e6}}\n")
    assert served_limits(monkeypatch, str(shop)) == ServerLimits(head_s=5, rows=7, bytes=10**6)
    assert served_limits(monkeypatch, str(shop), "--limits", "{head_s: 6}") == ServerLimits(
        head_s=6, rows=7, bytes=10**6
    )


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        ("{heads_s: 3}", ["--limits:1: heads_s", "unknown key", "did you mean 'head_s'?"]),
        ("{head_s: soon}", ["--limits:1: head_s", "must be a number above 0"]),
        ("{head_s: 0}", ["--limits:1: head_s", "must be a number above 0, not 0"]),
        ("{log_bytes: 100}", ["--limits:1: log_bytes", "at least 1,048,576"]),
        ("{spare_workers: -1}", ["--limits:1: spare_workers", "at least 0"]),
        ("[3]", ["--limits", "must be a mapping with the keys requests"]),
    ],
)
def test_mistakes_about_limits_are_told(app: Path, tmp_path: Path, limits: str, told: list[str]) -> None:
    file = tmp_path / "bounds.yaml"
    file.write_text(limits)
    for given, where in ((limits, "--limits"), (str(file), str(file))):
        if given.startswith("["):
            continue  # a list is no mapping, so it is the name of a file
        result = CliRunner().invoke(main, ["serve", str(app), "--limits", given])
        assert result.exit_code == 1
        assert all(part.replace("--limits", where) in result.stderr for part in told), result.stderr


def test_a_limit_of_a_server_in_an_application_is_told_where_it_belongs(app: Path) -> None:
    app.write_text(app.read_text() + "limits: {idle_s: 3}\n")
    result = CliRunner().invoke(main, ["serve", str(app)])
    assert (result.exit_code, "'idle_s' is a limit of a server" in result.stderr) == (1, True), result.stderr
    assert "--limits" in result.stderr


@pytest.mark.parametrize("option", sorted(serving.REMOVED))
def test_options_that_were_removed_say_what_replaces_them(app: Path, option: str) -> None:
    for given in ([option, "3"], [f"{option}=3"]):
        result = CliRunner().invoke(main, ["serve", str(app), *given])
        said = " ".join(result.stderr.split())
        assert (result.exit_code, f"{option} is no option any more: {serving.REMOVED[option]}" in said) == (2, True)
    kinds = (*serving.LIMITS, "bytes", "log_bytes")
    assert all(hasattr(ServerLimits(), key) for key in kinds)


def test_the_help_of_serve_is_in_groups() -> None:
    text = CliRunner().invoke(main, ["serve", "--help"]).output
    titles = ["Options:", "Clients:", "State, logs and spans:", "Other machines:"]
    assert [line for line in text.splitlines() if line in titles] == titles
    options = re.findall(r"^  (?:-h, )?--([a-z-]+)", text, re.MULTILINE)
    assert len(set(options) - {"json", "help"}) <= 26


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--tls-cert", "a.pem"], "--tls-key is missing"),
        (["--tls-key", "a.pem"], "--tls-cert is missing"),
        (["--tls-client-ca", "a.pem"], "--tls-cert is missing"),
        (["--tls-cert", "a.pem", "--tls-key", "a.key"], "a.pem: cannot be read"),
    ],
)
def test_tls_that_cannot_work_is_told_before_anything_starts(app: Path, options: list[str], told: str) -> None:
    result = CliRunner().invoke(main, ["serve", str(app), *options])
    assert result.exit_code == 1
    assert told in result.stderr


RAY = ["--backend", "ray", "--agents-port", "9000"]


@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        (["--agents-tls", "tls"], 2, "--agents-tls has no meaning with --backend local"),
        ([*RAY, "--agents-tls", "none"], 1, "none/tls.crt, "),
        (
            [*RAY, "--agents-tls-cert", "a.pem"],
            2,
            "is no option any more: name a folder with tls.crt, tls.key and ca.crt",
        ),
        (["--agents-port", "9000"], 2, "--agents-port has no meaning with --backend local"),
        (
            ["--backend", "agents", "--address", "10.0.0.1:9000"],
            2,
            "--backend agents is gone, because Ray starts agents",
        ),
        ([*RAY, "--token-file", "token"], 2, "--token-file is no option any more: the state folder"),
    ],
)
def test_mistakes_about_other_machines_are_told(app: Path, options: list[str], code: int, told: str) -> None:
    result = CliRunner().invoke(main, ["serve", str(app), *options])
    assert (result.exit_code, told in " ".join(result.stderr.split())) == (code, True), result.stderr


def test_a_command_of_earlier_versions_says_what_replaces_it() -> None:
    result = CliRunner().invoke(main, ["agent", "--join", "10.0.0.1:9000", "--name", "one"])
    assert (result.exit_code, "because Ray starts agents: run `ray start" in " ".join(result.stderr.split())) == (
        2,
        True,
    )


def test_files_of_tls_between_machines_reach_the_server(
    app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_certificate(tmp_path, "authority")
    make_certificate(tmp_path, "node", issuer="authority")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tls").mkdir()
    expected = NodeTls(*(tmp_path / "tls" / name for name in ("tls.crt", "tls.key", "ca.crt")))
    for name, file in (("node.pem", expected.cert), ("node.key", expected.key), ("authority.pem", expected.ca)):
        (tmp_path / name).rename(file)
    seen: list[object] = []
    monkeypatch.setattr(serving, "serve_until_stopped", lambda _, settings, **__: seen.append(settings.nodes))
    result = CliRunner().invoke(main, ["serve", str(app), *RAY, "--agents-tls", "tls"])
    assert result.exit_code == 0, result.stderr
    assert seen == [NodeSettings("", 9000, expected)]


def test_keys_come_from_a_file_and_user_code_does_not_see_the_one_of_the_environment(
    app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[tuple[object, ...]] = []

    def serve(_: object, settings: Settings, **__: object) -> None:
        seen.append((settings.api_key, settings.api_key_file, os.environ.get("SLOOP_API_KEY")))

    monkeypatch.setattr(serving, "serve_until_stopped", serve)
    file = tmp_path / "keys"
    assert CliRunner(env={"SLOOP_API_KEY": "hidden"}).invoke(main, ["serve", str(app)]).exit_code == 0
    assert CliRunner().invoke(main, ["serve", str(app), "--api-key-file", str(file)]).exit_code == 0
    assert not caplog.records
    assert seen == [("hidden", None, None), ("", file, None)]


def test_children_do_not_inherit_the_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLOOP_API_KEY", "hidden")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "child.py").write_text(
        "import os\nprint(sorted(n for n in os.environ if n in ('SLOOP_API_KEY', 'PATH')))"
    )
    child = spawn("child", [], stdout=subprocess.PIPE)
    assert child.communicate(timeout=30)[0] == b"['PATH']\n"


MAPPED = """
import ctypes, sys
from sloop.memory import loading, return_large_memory
class Report(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", *"abcdef")]
library = ctypes.CDLL(None)
library.mallinfo2.restype = Report
if sys.argv[1] == "on":
    return_large_memory()
def mapped():
    bytearray(16 << 20)  # freed at once
    before = library.mallinfo2().hblks
    kept = bytearray(4 << 20)
    return library.mallinfo2().hblks - before
if sys.argv[1] == "loading":
    with loading():
        print(mapped())
print(mapped())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
@pytest.mark.parametrize(("setting", "mapped"), [("off", "0"), ("on", "1"), ("loading", "1\n0")])
def test_large_buffers_go_back_to_the_system(setting: str, mapped: str) -> None:
    command = [sys.executable, "-c", MAPPED, setting]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == mapped


KEYS = {"sent", "ok", "late", "dropped", "rejected", "errors", "attainment", "goodput_rps", "p50_ms", "p99_ms"}


@pytest.mark.live
def test_a_trace_is_sent_and_counted(server: "subprocess.Popen[str]") -> None:
    assert server.stdout is not None
    url = json.loads(server.stdout.readline())["http"]
    arguments = ["load", url, "--trace", "{kind: equal, rate: 20}", "--duration-s", "1", "--slo-ms", "20000", "--json"]
    result = CliRunner().invoke(main, [*arguments, "--link", "{kind: constant, mbps: 100}"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer.keys() >= KEYS
    assert (answer["sent"], answer["ok"]) == (20, 20)


@pytest.mark.live
def test_processes_that_serve_have_no_solver_and_no_plots(server: "subprocess.Popen[str]") -> None:
    assert server.stdout is not None
    url = json.loads(server.stdout.readline())["http"]
    arguments = ["load", url, "--trace", "{kind: equal, rate: 20}", "--duration-s", "1", "--slo-ms", "20000", "--json"]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    libraries = {path.parts[path.parts.index("site-packages") + 1] for pid in family(server.pid) for path in maps(pid)}
    assert {"numpy", "onnxruntime", "uvloop"} <= libraries
    assert not SOLVERS_AND_PLOTS & libraries


def family(pid: int) -> Iterator[int]:
    """A process and all that come from it."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            yield from family(int(child))


def maps(pid: int) -> Iterator[Path]:
    """The files of installed packages that a process has mapped."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "/site-packages/" in line:
            yield Path(line.split(maxsplit=5)[-1])


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (
            ["http://127.0.0.1:1", "--slo-ms", "1", "--trace", "{kind: equal, rate: 1}", "--duration-s", "1"],
            1,
            "no server",
        ),
        (
            ["nonsense", "--model", "m", "--slo-ms", "1", "--trace", "{kind: equal, rate: 1, duration_s: 1}"],
            1,
            "http://",
        ),
        (["http://127.0.0.1:1", "--slo-ms", "1"], 2, "--trace"),
    ],
)
def test_what_cannot_be_sent_is_said(arguments: list[str], code: int, said: str) -> None:
    result = CliRunner().invoke(main, ["load", *arguments, "--slo-ms", "1"])
    assert result.exit_code == code
    assert said in result.stderr


def test_json_has_the_promised_keys_and_the_profile_lies_beside_the_model(model: Path) -> None:
    arguments = [
        "profile",
        str(model),
        "--batches",
        "1,2",
        "--cores",
        "1",
        "--seconds",
        "0.02",
        "--passes",
        "2",
        "--json",
    ]
    arguments.append("--alone")
    result = CliRunner().invoke(main, arguments)
    answer = json.loads(result.stdout)
    assert answer.keys() >= {"model", "hardware", "samples", "load_ms", "memory_bytes", "fits"}
    assert [sample["batch"] for sample in answer["samples"]] == [1, 2]
    assert answer["samples"][0].keys() >= {"batch", "cores", "p50_ms", "p99_ms", "n"}
    assert answer["fits"]["table"].keys() >= {"params", "r2", "mape"}
    kept = load_profile(model.with_name("tiny.onnx.profile.json"))
    assert kept.origin == "measured"
    assert len(kept.samples) == 2
    assert [len(one.samples) for one in kept.passes] == [2, 2]
    assert answer["passes"][0].keys() == {"date", "in_service", "beside", "cells"}
    assert answer["speed_range"].keys() == {"fast", "slow", "passes"}
    assert answer["load_ms"] == pytest.approx(1e3 * sum(answer["startup"].values()))


@pytest.mark.live
def test_a_profile_is_also_measured_in_service(model: Path) -> None:
    arguments = ["profile", str(model), "--batches", "1,2", "--cores", "1", "--seconds", "0.02", "--passes", "1"]
    result = CliRunner().invoke(main, [*arguments, "--json"])
    assert result.exit_code == 0, result.stderr
    assert "measuring tiny.onnx takes about 13 s; --passes 3 gives predictions a range" in result.stderr
    alone, in_service = json.loads(result.stdout)["passes"]
    assert "stand-in for edge and clients" in alone["beside"]
    assert in_service["in_service"]
    assert "the server and a load generator" in in_service["beside"]
    kept = load_profile(model.with_name("tiny.onnx.profile.json"))
    shown = {(s.batch, s.cores): s for s in kept.passes[1].samples}
    assert (1, 1.0) in shown
    assert next(s for s in kept.samples if s.batch == 1) == shown[1, 1.0]


@pytest.mark.parametrize(("passes", "served", "steps"), [(1, [1.0, 2.0], 4), (2, [1.0, 1.5, 2.0], 8)])
def test_a_single_pass_is_served_on_the_fewest_and_the_most_cores_and_slow_models_are_told(
    passes: int, served: list[float], steps: int, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = (1.0, 1.5, 2.0)
    cells = [Sample(batch, cores, 900.0 * batch, 900.0 * batch, 30) for cores in every for batch in (1, 2)]
    asked: list[tuple[list[float], int]] = []

    def serves(_: Path, samples: Sequence[Sample], *__: object, rates: Sequence[float], **___: object) -> Pass:
        asked.append((sorted({sample.cores for sample in samples}), len(rates)))
        return Pass(date="2026-11-22", in_service=True, samples=tuple(samples))

    def measures(
        *_: object,
        progress: Callable[[float, Sample], None],
        in_service: Callable[[Sequence[Sample]], Pass | None],
        **__: object,
    ) -> Profile:
        progress(500.0, cells[0])
        made = [in_service(cells) for _number in range(passes)]
        alone = Pass(date="2026-11-22", samples=tuple(cells))
        fits = fit_all(cells, "p99")
        rest = {"samples": tuple(cells), "passes": (alone, *filter(None, made)), "fits": fits}
        return Profile(latency_ms=fits["table"].params, max_batch=2, max_cores=2, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "measure", measures)
    monkeypatch.setattr(module, "service_pass", serves)
    result = CliRunner().invoke(main, ["profile", str(model), "--cores", "1,1.5,2", "--passes", str(passes)])
    assert result.exit_code == 0, result.stderr
    assert asked == [(served, steps)] * passes
    assert "takes about" in result.stderr.splitlines()[0]
    assert (
        f"tiny.onnx is slow on this machine: about {500 + passes * len(served) * (steps + 3)} s in all" in result.stderr
    )
    shown = " ".join(result.stdout.split())
    assert "1 core with batches larger than 2, 1.5 cores with batches larger than 2 and 2 cores with" in shown
    assert ("--passes 3 gives one" in shown) == (passes == 1)


def test_a_service_pass_that_fails_is_named_with_its_reason(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise MachineError("the server did not start: it exited with status 1: no memory")

    monkeypatch.setattr(module, "service_pass", fails)
    arguments = ["profile", str(model), "--batches", "1", "--cores", "1", "--seconds", "0.01", "--passes", "2"]
    result = CliRunner().invoke(main, arguments)
    shown = " ".join(result.stdout.split())
    why = "failed: the server did not start: it exited with status 1: no memory"
    assert f"service pass 1 of 2 {why}; the profile uses 0" in shown
    assert f"service pass 2 of 2 {why}; the profile uses 0" in shown
    assert "load around it" in shown
    answer = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).stdout)
    assert answer["failed_passes"] == [f"service pass {number} of 2 {why}" for number in (1, 2)]
    monkeypatch.setattr(module, "service_pass", lambda *_, **__: None)
    assert "pass 1 of 2 failed: no batch size ran often enough" in CliRunner().invoke(main, arguments).stdout


def test_cells_without_runs_and_the_p99_that_plans_use_are_shown(tmp_path: Path) -> None:
    samples = (Sample(1, 1.0, 9.0, 10.0, 100), Sample(2, 1.0, 18.0, 20.0, 0, scaled=1.5))
    table = LatencyTable({1: {1.0: 10.0}, 2: {1.0: 21.0}})
    profile = Profile(latency_ms=table, max_batch=2, max_cores=1, samples=samples)
    cells, *lines = module.display(profile, tmp_path, "table")
    shown = io.StringIO()
    Console(file=shown, width=120).print(cells)
    assert shown.getvalue().splitlines()[1].split("  ")[-1].strip() == "rows/s"
    assert "plan uses ms" in shown.getvalue()
    (row,) = [line.split() for line in shown.getvalue().splitlines() if "interpolated" in line]
    assert row == ["2", "1", "18", "20", "21", "interpolated", "111.1"]
    assert "1 cell did not occur in service: times were multiplied by 1.5, the mean ratio" in str(lines)


def test_a_log_that_a_profile_has_already_is_said_to_be_ignored(tmp_path: Path) -> None:
    arguments = ["profile", "--from-log", str(logged(tmp_path, "live"))]
    assert "was ignored" not in CliRunner().invoke(main, arguments).stdout
    before = (tmp_path / "p.json").read_bytes()  # the profile that the application declares
    again = CliRunner().invoke(main, arguments)
    assert "the profile of net.onnx contains this log already: it was ignored" in again.stdout
    assert (tmp_path / "p.json").read_bytes() == before
    assert "does not read" not in again.stdout
    (refined,) = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).stdout)["profiles"]
    assert (refined["log_known"], refined["is_read"], refined["file"]) == (True, True, str(tmp_path / "p.json"))
    elsewhere = CliRunner().invoke(main, [*arguments, "--out", str(tmp_path / "new.json")]).stdout
    assert "does not read" in elsewhere, "the application goes on with the profile that it declares"
    assert "as the `profile` of net.onnx" in elsewhere


def test_a_form_that_needs_more_cells_is_refused(model: Path) -> None:
    arguments = ["profile", str(model), "--batches", "1", "--cores", "1", "--seconds", "0.01", "--form", "amdahl"]
    arguments += ["--alone", "--passes", "1"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    assert "too few measurements" in result.stderr


def test_a_profile_may_be_for_one_kind_of_hardware(model: Path) -> None:
    """Its file and its provenance name the kind; an application with such nodes finds it beside the model."""
    arguments = ["profile", str(model), "--batches", "1", "--cores", "1", "--seconds", "0.01", "--alone"]
    result = CliRunner().invoke(main, [*arguments, "--passes", "1", "--hardware", "c5.2xlarge"])
    assert result.exit_code == 0, result.output
    made = load_profile(model.with_name("tiny.onnx.c5.2xlarge.profile.json"))
    assert made.hardware.startswith("c5.2xlarge: ")
    assert not model.with_name("tiny.onnx.profile.json").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["x.onnx", "--hardware", "a/b"], 1, "'a/b' is not a kind of hardware"),
        (["--hardware", "c5.2xlarge", "--from-log", "x.jsonl"], 2, "a log has its own"),
        (["nowhere.onnx"], 1, "no such file"),
        (["nowhere.onnx", "--batches", "1,x"], 2, "1,2,4"),
        ([], 2, "MODEL"),
    ],
)
def test_wrong_use_of_profile_is_refused(arguments: list[str], code: int, said: str) -> None:
    result = CliRunner().invoke(main, ["profile", *arguments])
    assert result.exit_code == code
    assert said in result.stderr


def test_a_model_in_python_is_measured_or_refused(tmp_path: Path) -> None:
    stage = tmp_path / "stage.py"
    ports = "inputs = {'x': ('FP32', (1, 2))}\n    outputs = {'y': ('FP32', (1, 2))}"
    stage.write_text(
        f"class Model:\n    {ports}\n    def __init__(self, threads): pass\n    def run(self, x): return x\n"
    )
    asked = ["profile", str(stage), "--cores", "1", "--seconds", "0.01", "--passes", "1", "--alone", "--json"]
    result = CliRunner().invoke(main, [*asked, "--batches", "1"])
    assert [sample["batch"] for sample in json.loads(result.stdout)["samples"]] == [1]
    assert load_profile(tmp_path / "stage.py.profile.json").software.startswith("Python 3")
    assert "measure single requests with --batches 1\n" in CliRunner().invoke(main, [*asked, "--batches", "1,2"]).stderr
    assert [sample["batch"] for sample in json.loads(CliRunner().invoke(main, asked).stdout)["samples"]] == [1]


def test_its_length_is_bounded() -> None:
    """The whole of it is what `make demo` is for; here only that wrong use is refused before anything begins."""
    result = CliRunner().invoke(main, ["demo", "--seconds", "5"])
    assert result.exit_code == 2
    assert "10<=x<=600" in result.stderr


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Deployment]:
    """What would have been served."""
    found: list[Deployment] = []
    monkeypatch.setattr(serving, "serve_until_stopped", lambda deployment, *given, **named: found.append(deployment))
    return found


def serve_folder(folder: Path, *more: str) -> Result:
    return CliRunner().invoke(main, ["serve", str(folder), "--state", str(folder / "state"), "--no-profile", *more])


def test_a_folder_is_its_application_file_or_its_only_model(model: Path, started: list[Deployment]) -> None:
    folder = model.parent
    assert serve_folder(folder).exit_code == 0
    (folder / "one.yaml").write_text(APPLICATION.replace("name: demo", "name: one"))
    assert serve_folder(folder).exit_code == 0
    (folder / "two.yml").write_text(APPLICATION)
    done = serve_folder(folder)
    assert (done.exit_code, "one.yaml and two.yml: name one of them, or call one app.yaml" in done.stderr) == (2, True)
    (folder / "app.yaml").write_text(APPLICATION)
    assert serve_folder(folder).exit_code == 0
    assert [each.name for each in started] == ["tiny", "one", "demo"]


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "readme.txt").touch()
    done = serve_folder(tmp_path)
    assert (done.exit_code, "has no application file and no model" in done.stderr) == (2, True)


def test_the_name_of_a_single_application_may_be_given(model: Path, app: Path, started: list[Deployment]) -> None:
    assert serve_folder(model.parent, "--name", "other").exit_code == 0
    assert [(each.name, each.applications[0].name) for each in started] == [("other", "other")]
    assert "'a b' is no name" in serve_folder(model.parent, "--name", "a b").stderr
    several = CliRunner().invoke(main, ["serve", str(app), str(model), "--name", "other"])
    assert (several.exit_code, "--name is the name of a single application" in several.stderr) == (2, True)
