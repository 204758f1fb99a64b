"""What `deploy/` and docs/deployment.md tell others' programs is true of this one: options, metrics, times, schemas."""

import importlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from sloop.actions import VersionState
from sloop.app.limits import BODIES_BYTES_MAX, ServerLimits
from sloop.cli import COMMANDS, main
from sloop.demo import write_example
from sloop.runlog import read_log
from sloop.serve.edge.grpc.server import IDLE_S_MAX
from sloop.serve.metrics import Metrics
from sloop.serve.server import Settings
from sloop.units import GIB
from sloop.vocabulary import Life, Outcome
from tests.machines import FakeMachine
from tests.serve.test_metrics import ONE, Version

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file())
KUBERNETES = "1.32"
jsonschema: Any = importlib.import_module("jsonschema")
kubernetes_validate: Any = importlib.import_module("kubernetes_validate")  # neither has types


def read(name: str) -> str:
    return (DEPLOY / name).read_text()


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(read(name)))


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.relative_to(DEPLOY).as_posix())
def test_files_parse(file: Path) -> None:
    if file.suffix == ".yaml":
        assert all(isinstance(each, dict) for each in yaml.safe_load_all(file.read_text()))
    elif file.suffix == ".json":
        assert json.loads(file.read_text())["panels"]
    else:
        assert file.name in {
            "sloop.service",
            "Containerfile",
            "Containerfile.dockerignore",
            "haproxy.cfg",
        }


# Commands


def commands(text: str) -> Iterator[list[str]]:
    """The arguments of every `sloop` in a shell command."""
    words = shlex.split(text.replace("\n", " "))
    for at, word in enumerate(words):
        if word.rpartition("/")[2] == "sloop":
            following = words[at + 1 :]
            ends = [
                end for end, each in enumerate(following) if each[0] in "<>;&|" or (each[0] in "12" and ">" in each)
            ]
            yield following[: min(ends, default=len(following))]


def unit() -> list[tuple[str, str, str]]:
    """Section, key and value of each line of the systemd unit."""
    found, section = [], ""
    for line in read("systemd/sloop.service").splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.append((section, key, value))
    return found


def containerfile(instruction: str) -> list[str]:
    (text,) = re.findall(rf"^{instruction} (\[.*\])$", read("container/Containerfile"), re.MULTILINE)
    return list(json.loads(text))


@cache
def pods() -> dict[str, dict[str, Any]]:
    """The templates of all pods."""
    (deployment,) = (each for each in documents("kubernetes/sloop.yaml") if each["kind"] == "Deployment")
    (cluster,) = (each for each in documents("kuberay/raycluster.yaml") if each["kind"] == "RayCluster")
    (workers,) = cluster["spec"]["workerGroupSpecs"]
    (runtime,) = documents("kserve/runtime.yaml")
    return {
        "kserve": {"spec": {key: runtime["spec"][key] for key in ("containers", "volumes")}},
        "kubernetes": deployment["spec"]["template"],
        "head": cluster["spec"]["headGroupSpec"]["template"],
        "worker": workers["template"],
    }


def container_of(pod: str) -> dict[str, Any]:
    (only,) = pods()[pod]["spec"]["containers"]
    return dict(only)


def served() -> dict[str, list[str]]:
    """The arguments of `sloop` in each file that starts a server."""
    (started,) = [value for _, key, value in unit() if key == "ExecStart"]
    (cluster,) = documents("ray/cluster.yaml")
    return {
        "systemd": next(commands(started)),
        "container": containerfile("CMD"),
        "compose": documents("compose.yaml")[0]["services"]["sloop"]["command"],
        "kubernetes": container_of("kubernetes")["args"],
        "kuberay": next(commands(container_of("head")["args"][0])),
        "ray": next(commands(cluster["head_start_ray_commands"][-1])),
    }


def parameters_of(words: list[str]) -> dict[str, Any]:
    """The options of a command, with defaults. Raises UsageError for one that does not exist."""
    name, *arguments = words
    command = main.get_command(click.Context(main), name)
    assert command is not None
    return command.make_context(name, arguments).params


@pytest.mark.parametrize("where", ["systemd", "container", "compose", "kubernetes", "kuberay", "ray"])
def test_commands_have_options_that_exist(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert served()[where][0] == "serve"
    parameters = parameters_of(served()[where])
    assert parameters["no_profile"], "a server that measures a profile in production disturbs what it measures"
    assert parameters["host"] == "0.0.0.0"
    assert parameters["state"] is not None
    assert (parameters["api_key_file"] is None) == (where == "container")
    if where in {"kuberay", "ray"}:
        assert (parameters["backend"], parameters["address"]) == ("ray", "auto")


def shown_commands() -> list[list[str]]:
    text = (ROOT / "docs" / "deployment.md").read_text()
    quoted = re.findall(r"`(?:sudo -u \w+ \S*/)?(sloop [a-z]+ [^`]*)`", text)
    return [shlex.split(each)[1:] for each in quoted]


def test_commands_of_the_page_parse() -> None:
    found = shown_commands()
    assert len(found) > 5
    for name, *arguments in found:
        assert name in COMMANDS, name
        command = main.get_command(click.Context(main), name)
        assert command is not None
        given = [{"R": "30", "APP": "app.yaml"}.get(each, each) for each in arguments]
        command.make_context(name, given, resilient_parsing=False)


# Times


MARGIN_S = 10
"""For the last answers, and the ends of edges and workers."""


def stop_s(parameters: dict[str, Any]) -> float:
    """How long a server may take from SIGTERM to its end."""
    return float(parameters["grace_s"] + ServerLimits().drain_s + MARGIN_S)


def pre_stop_s(pod: str) -> int:
    """How long Kubernetes waits before it sends SIGTERM to a pod."""
    _, seconds = container_of(pod)["lifecycle"]["preStop"]["exec"]["command"]
    return int(seconds)


def test_stops_take_longer_than_grace_and_drain() -> None:
    own_s = {where: stop_s(parameters_of(served()[where])) for where in served()}
    (stop,) = [value for _, key, value in unit() if key == "TimeoutStopSec"]
    compose = documents("compose.yaml")[0]["services"]["sloop"]
    assert int(stop) >= own_s["systemd"]
    assert int(compose["stop_grace_period"].removesuffix("s")) >= own_s["compose"]
    for where, pod in (("kubernetes", "kubernetes"), ("kuberay", "head")):
        assert pods()[pod]["spec"]["terminationGracePeriodSeconds"] >= pre_stop_s(pod) + own_s[where]
    drained_s = pre_stop_s("head") + own_s["kuberay"] - MARGIN_S
    assert pre_stop_s("worker") >= drained_s, "workers stay until the head has drained"
    assert pods()["worker"]["spec"]["terminationGracePeriodSeconds"] > pre_stop_s("worker")
    (options,) = [each["docker"]["run_options"] for each in documents("ray/cluster.yaml")]
    (stop,) = [each.partition("=")[2] for each in options if each.startswith("--stop-timeout")]
    assert int(stop) >= own_s["ray"]
    page = (ROOT / "docs" / "deployment.md").read_text()
    (container_s,) = re.findall(r"docker stop --time (\d+)", page)
    assert int(container_s) >= own_s["container"]


def test_haproxy_knows_within_the_grace_time_that_a_server_stops() -> None:
    checks = re.findall(r"inter (\d+)s fall (\d+)", read("haproxy/haproxy.cfg"))
    assert len(checks) == 2
    assert all(int(every_s) * int(times) < Settings().grace_s for every_s, times in checks)


def test_envoy_knows_it_as_soon_and_closes_idle_connections_before_the_server_does() -> None:
    (resources,) = [each["static_resources"] for each in documents("envoy/envoy.yaml")]
    for cluster in resources["clusters"]:
        (check,) = cluster["health_checks"]
        assert check["http_health_check"]["path"] == "/v2/health/ready"
        asked_s = [int(check[key].removesuffix("s")) for key in ("interval", "no_traffic_interval")]
        assert max(asked_s) * check["unhealthy_threshold"] < Settings().grace_s
        (protocol,) = cluster["typed_extension_protocol_options"].values()
        assert int(protocol["common_http_protocol_options"]["idle_timeout"].removesuffix("s")) < ServerLimits().idle_s
    for listener in resources["listeners"]:
        ((manager,),) = [each["filters"] for each in listener["filter_chains"]]
        ((route,),) = [host["routes"] for host in manager["typed_config"]["route_config"]["virtual_hosts"]]
        assert int(route["route"]["timeout"].removesuffix("s")) > ENVOY_TIMEOUT_S


ENVOY_TIMEOUT_S = 15
"""After which Envoy ends a request by default."""


def test_probes_ask_pages_that_exist() -> None:
    rest = (ROOT / "src" / "sloop" / "serve" / "edge" / "rest.py").read_text()
    text = "".join(file.read_text() for file in FILES if file.suffix != ".json")
    paths = set(re.findall(r"/v2/[a-z/]+", text))
    assert paths == {"/v2/health/live", "/v2/health/ready", "/v2/sloop/decisions"}
    assert all(f'"{path}"' in rest for path in paths)
    ports = {each["name"]: each["containerPort"] for each in container_of("kubernetes")["ports"]}
    assert ports == {"http": Settings().http_port, "grpc": Settings().grpc_port}


# systemd

KNOWN = {
    "Unit": "Description Wants After StartLimitIntervalSec StartLimitBurst",
    "Install": "WantedBy",
    "Service": "Type User Group UMask WorkingDirectory StateDirectory StateDirectoryMode ExecStart ExecReload KillMode "
    "KillSignal TimeoutStopSec Restart RestartSec OOMPolicy Delegate LimitNOFILE LimitNICE MemoryMax NoNewPrivileges "
    "CapabilityBoundingSet AmbientCapabilities ProtectSystem ProtectHome PrivateTmp PrivateDevices ProtectProc "
    "ProcSubset ProtectControlGroups ProtectKernelTunables ProtectKernelModules ProtectKernelLogs ProtectClock "
    "ProtectHostname RestrictAddressFamilies RestrictNamespaces RestrictRealtime RestrictSUIDSGID LockPersonality "
    "RemoveIPC SystemCallArchitectures SystemCallFilter SystemCallErrorNumber",
}
"""Source: systemd.unit(5), systemd.service(5), systemd.exec(5), systemd.kill(5), systemd.resource-control(5)."""


def test_the_unit_has_settings_that_systemd_knows_and_that_sloop_needs(tmp_path: Path) -> None:
    for section, key, _ in unit():
        assert key in KNOWN[section].split(), key
    values = {key: value for _, key, value in unit()}
    assert values["KillMode"] == "mixed", "SIGTERM is for the deciding process"
    assert values["Delegate"] in {"yes", "cpu"}
    assert values["ProtectControlGroups"] == "no", "replicas have groups of their own"
    assert values["ProcSubset"] == "all", "/proc/cpuinfo is read"
    assert values["OOMPolicy"] == "continue", "a worker is replaced"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_finds_no_fault_in_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / "sloop.service"
    copy.write_text(read("systemd/sloop.service").replace("/opt/sloop/bin/sloop", "/bin/true"))
    found = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, check=False)
    assert (found.returncode, [line for line in found.stderr.splitlines() if copy.name in line]) == (0, [])


# Schemas


@pytest.mark.parametrize("name", ["kubernetes/sloop.yaml", "kuberay/raycluster.yaml"])
def test_manifests_follow_the_schemas_of_kubernetes(name: str) -> None:
    for each in documents(name):
        if each["apiVersion"] != "ray.io/v1":
            kubernetes_validate.validate(each, KUBERNETES, strict=True)


@pytest.mark.parametrize("pod", ["kubernetes", "head", "worker"])
def test_pods_follow_the_schema_and_run_without_rights(pod: str) -> None:
    template = {"metadata": {}, **pods()[pod]}
    whole = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": pod}, "template": template}
    kubernetes_validate.validate(whole, KUBERNETES, strict=True)
    assert template["spec"]["securityContext"]["runAsNonRoot"]
    resources = container_of(pod)["resources"]
    assert resources["requests"] == resources["limits"], "guaranteed"
    names = {each["name"] for each in template["spec"]["volumes"]}
    assert {each["name"] for each in container_of(pod)["volumeMounts"]} == names


GROUP = {"rayStartParams", "template"}
RAY_CLUSTER = {
    "spec": ({"headGroupSpec"}, {"rayVersion", "authOptions", "workerGroupSpecs"}),
    "head": (GROUP, {"serviceType"}),
    "worker": (GROUP | {"groupName", "minReplicas", "maxReplicas"}, {"replicas"}),
}
"""Keys that must be there, and others that we use. Source: KubeRay 1.5, apis/ray/v1/raycluster_types.go."""


def test_the_ray_cluster_of_kubernetes_has_the_keys_of_kuberay() -> None:
    (cluster,) = (each for each in documents("kuberay/raycluster.yaml") if each["kind"] == "RayCluster")
    spec = cluster["spec"]
    parts = {"spec": spec, "head": spec["headGroupSpec"], "worker": spec["workerGroupSpecs"][0]}
    for name, (needed, others) in RAY_CLUSTER.items():
        assert needed <= parts[name].keys() <= needed | others, name
    assert spec["authOptions"] == {"mode": "token"}
    assert cluster["metadata"]["annotations"] == {"ray.io/overwrite-container-cmd": "true"}
    for group in ("head", "worker"):
        assert all(isinstance(value, str) for value in parts[group]["rayStartParams"].values())
    (service,) = (each for each in documents("kuberay/raycluster.yaml") if each["kind"] == "Service")
    assert service["spec"]["selector"]["ray.io/cluster"] == cluster["metadata"]["name"]


RAY_LAUNCHER = {"cluster_name", "provider", "auth", "docker", "file_mounts"} | {
    f"{node}_start_ray_commands" for node in ("head", "worker")
}
"""Source: Ray 2.60, ray/autoscaler/ray-schema.json."""


def test_the_ray_cluster_of_ones_own_machines_follows_rays_schema() -> None:
    (cluster,) = documents("ray/cluster.yaml")
    assert cluster.keys() == RAY_LAUNCHER
    assert "--env=RAY_AUTH_MODE=token" in cluster["docker"]["run_options"]
    ray = importlib.util.find_spec("ray")
    if ray is not None and ray.origin is not None:
        schema = json.loads((Path(ray.origin).parent / "autoscaler" / "ray-schema.json").read_text())
        jsonschema.validate(cluster, schema)


COMPOSE = {
    "": "name services volumes secrets",
    "sloop": "build image command ports volumes restart stop_grace_period mem_limit ulimits read_only tmpfs cap_drop "
    "security_opt logging",
    "prometheus": "image command ports volumes restart",
    "grafana": "image environment ports secrets volumes depends_on restart",
}
"""Source: compose-spec/compose-spec, schema/compose-spec.json."""


RUNTIME = {"annotations", "supportedModelFormats", "protocolVersions", "multiModel", "containers", "volumes"}
"""The keys of a runtime that we use. Source: KServe 0.15, pkg/apis/serving/v1alpha1/servingruntime_types.go."""
FORMAT = {"name", "version", "autoSelect", "priority"}


def test_the_runtime_of_kserve_has_its_keys_and_serves_under_its_conditions() -> None:
    """Any user, nothing but /tmp to write to, the models under /mnt/models, port 8080, the name of the service."""
    (runtime,) = documents("kserve/runtime.yaml")
    assert (runtime["apiVersion"], runtime["kind"]) == ("serving.kserve.io/v1alpha1", "ServingRuntime")
    spec = runtime["spec"]
    assert spec.keys() == RUNTIME
    assert all(each.keys() <= FORMAT for each in spec["supportedModelFormats"])
    assert set(spec["protocolVersions"]) <= {"v1", "v2", "grpc-v1", "grpc-v2"}
    pod = {"metadata": {}, **pods()["kserve"]}
    whole = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "kserve"}, "template": pod}
    kubernetes_validate.validate(whole, KUBERNETES, strict=True)
    container = container_of("kserve")
    assert container["name"] == "kserve-container", "KServe looks for this name"
    rights = container["securityContext"]
    assert rights["runAsNonRoot"]
    assert rights["readOnlyRootFilesystem"]
    assert "runAsUser" not in rights
    assert "HOME" not in {each["name"] for each in container["env"]}
    assert [each["mountPath"] for each in container["volumeMounts"]] == ["/tmp"]
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert container["args"][:2] == ["serve", "/mnt/models"]
    given = parameters_of(["serve", "models", *container["args"][2:]])
    assert (given["name"], given["host"], given["http_port"]) == ("{{.Name}}", "0.0.0.0", 8080)
    assert given["state"].is_relative_to("/tmp")
    assert [each["containerPort"] for each in container["ports"]] == [8080]
    assert spec["annotations"]["prometheus.kserve.io/port"] == "8080"
    (example_s,) = re.findall(r"terminationGracePeriodSeconds: (\d+)", read("kserve/runtime.yaml"))
    assert int(example_s) >= stop_s(given)


def test_the_image_has_the_locale_of_text_operators() -> None:
    text = read("container/Containerfile")
    assert "localedef --no-archive -i en_US -f UTF-8 /usr/lib/locale/en_US.utf8" in text
    assert "COPY --from=build /usr/lib/locale/en_US.utf8 /usr/lib/locale/en_US.utf8" in text


FAKED = """
import os, pathlib, sloop.machine
os.sched_getaffinity = lambda pid: set(range(8))
sloop.machine.PROC = pathlib.Path({proc!r})
"""
"""The `sitecustomize` of processes that see eight CPUs, and control groups of the test."""


def tried(where: str, folder: Path) -> list[str]:
    """The command of a file, with paths and ports of a test instead of its own."""
    own = {
        "--host": "127.0.0.1",
        "--state": str(folder / "state"),
        "--api-key-file": str(folder / "keys"),
        **{"--name": "digits", "--http-port": "0", "--grpc-port": "0"},
    }
    command = container_of("kserve")["args"] if where == "kserve" else served()[where]
    words = [word for each in command for word in each.split("=", 1)]
    words = [own.get(before, word) for before, word in zip(["", *words], words, strict=False)]
    words = [str(folder / "app.yaml") if re.match(r"/models|/etc/sloop/app", word) else word for word in words]
    words = [str(folder) if word == "/mnt/models" else word for word in words]
    return words if "--http-port" in words else [*words, "--http-port", "0", "--grpc-port", "0"]


@pytest.mark.live
@pytest.mark.parametrize("where", ["systemd", "container", "compose", "kubernetes", "kserve"])
def test_servers_start_on_a_node_of_eight_cpus_with_a_limit_of_four(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = container_of(where)["resources"]["limits"] if where in pods() else {"cpu": "4", "memory": "4Gi"}
    cores, memory_bytes = float(limits["cpu"]), int(limits["memory"].removesuffix("Gi")) * GIB
    with monkeypatch.context() as here:
        machine = FakeMachine(tmp_path / "machine", here)
        machine.move("/pod/container")
        machine.limit("/pod", cores=cores, memory_bytes=memory_bytes)
    (tmp_path / "sitecustomize.py").write_text(FAKED.format(proc=str(machine.proc)))
    (tmp_path / "keys").write_text("me 0123456789abcdef0123456789abcdef\n")
    write_example(tmp_path)
    (tmp_path / "wave.yaml").unlink()
    table = {"form": "table", "table": {1: {1: 8, 4: 3}}}
    profile = {"latency_ms": table, "max_batch": 1, "max_cores": 4, "load_s": 1, "origin": "assumed", "source": "x"}
    stage = {"name": "read", "model": "./digits.onnx", "profile": profile}
    (tmp_path / "app.yaml").write_text(yaml.safe_dump({"name": "digits", "slo_ms": 500, "stages": [stage]}))
    with subprocess.Popen(
        [sys.executable, "-m", "sloop", *tried(where, tmp_path), "--json"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline() or "{}")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert "http" in said, (said, errors)
    [node] = read_log(tmp_path / "state" / "log").header.cluster
    assert (node.cores, node.memory_bytes) == (cores, memory_bytes)


def test_the_compose_file_has_keys_of_the_specification_and_mounts_what_there_is() -> None:
    (whole,) = documents("compose.yaml")
    assert whole.keys() == set(COMPOSE[""].split())
    for name, service in whole["services"].items():
        assert service.keys() == set(COMPOSE[name].split()), name
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            if source.startswith("./") and source.split("/")[1] not in {"models", "secrets"}:
                assert (DEPLOY / source).is_file(), source
            elif not source.startswith("./"):
                assert source in whole["volumes"]
    build = whole["services"]["sloop"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()


def test_the_image_is_built_from_all_that_the_package_needs() -> None:
    text = read("container/Containerfile")
    copied = {word for line in re.findall(r"^COPY (?!--)(.*)$", text, re.MULTILINE) for word in line.split()[:-1]}
    sent = {line[1:] for line in read("container/Containerfile.dockerignore").splitlines() if line.startswith("!")}
    project = (ROOT / "pyproject.toml").read_text()
    assert copied == sent == {"pyproject.toml", "README.md", "LICENSE", "src"}
    assert 'readme = "README.md"' in project
    assert 'license-files = ["LICENSE"]' in project


# Metrics


@cache
def families() -> dict[str, set[str]]:
    """The labels of every series that a server has; `job` and `instance` are Prometheus' own."""
    metrics = Metrics([Version(ONE.graph)])
    found = {"up": {"job", "instance"}}
    for family in (*metrics.families("demo", (), {}), *metrics._server_families()):
        labels = {*family._labelnames, "instance", "job"}  # type: ignore[attr-defined]
        if isinstance(family, HistogramMetricFamily):
            found |= {f"{family.name}_bucket": labels | {"le"}}
            found |= {f"{family.name}_{each}": labels for each in ("count", "sum")}
        else:
            found[family.name + "_total" * isinstance(family, CounterMetricFamily)] = labels
    return found


def test_the_families_are_those_of_an_exposition() -> None:
    metrics = Metrics([Version(ONE.graph)])
    text = metrics.exposition().decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels.keys() <= families()[sample.name], sample.name
    declared = {name.removesuffix("_total") for name in re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)}
    known = {re.sub(r"_(total|bucket|count|sum)$", "", name) for name in families()}
    assert declared == known - {"up"}


def values(label: str) -> set[str]:
    """The values that a label of ours may have."""
    text = Metrics([Version(ONE.graph)]).exposition().decode()
    found = set(re.findall(rf'{label}="([^"]*)"', text))
    own: dict[str, set[str]] = {
        "outcome": {*Outcome},
        "life": {*Life},
        "state": {*VersionState},
        "kind": {"planner"},
        "step": {"total"},
        "job": {each["job_name"] for each in documents("monitoring/prometheus.yaml")[0]["scrape_configs"]},
    }
    return found | own.get(label, set())


SERIES = re.compile(r"\b(up|sloop[\w:]+)(?:\{([^}]*)\})?")
GROUPED = re.compile(r"\bby \(([^)]*)\) \((?:rate|increase)?\(?(up|sloop[\w:]+)")


def recorded() -> dict[str, str]:
    """The expressions of the recording rules, by name."""
    return {rule["record"]: rule["expr"] for rule in rules() if "record" in rule}


def rules() -> list[dict[str, Any]]:
    return [rule for group in documents("monitoring/alerts.yaml")[0]["groups"] for rule in group["rules"]]


def labels_of(name: str) -> set[str]:
    """The labels of a series of a server, or of a recording rule."""
    if name in recorded():
        return {"model"}
    assert name in families(), f"a server has no metric {name}"
    return families()[name]


def check_expression(expression: str) -> set[str]:
    """Every name, label and value in a PromQL expression exists. Returns the labels that its result has."""
    plain = re.sub(r'"[^"]*"', '""', expression)
    assert plain.count("(") == plain.count(")"), expression
    names = [name for name, _ in SERIES.findall(expression)]
    assert names, expression
    for name, matchers in SERIES.findall(expression):
        for label, value in re.findall(r'(\w+)(?:=~|!=|=)"([^"]*)"', matchers):
            assert label in labels_of(name), f"{name} has no label {label}"
            for each in value.split("|"):
                assert value == "$model" or each in values(label), f"{label} is never {each}"
    groups = GROUPED.findall(expression)
    assert len(groups) == expression.count("by ("), expression
    for by, name in groups:
        assert {each.strip() for each in by.split(",")} <= labels_of(name), f"{name}: {by}"
    kept = [{each.strip() for each in by.split(",")} for by, _ in groups] or [labels_of(name) for name in names]
    return set.union(*kept) - {"le"}


def panels() -> list[dict[str, Any]]:
    return [each for each in json.loads(read("monitoring/grafana-dashboard.json"))["panels"] if each["type"] != "row"]


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_panels_ask_for_metrics_that_exist(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        labels = check_expression(target["expr"])
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels, target["legendFormat"]


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    board = json.loads(read("monitoring/grafana-dashboard.json"))
    everything = board["panels"]
    assert [each["title"] for each in everything if each["type"] == "row"] == [
        *("Deadlines", "Load", "Capacity", "Starts", "Edges", "Deciding process")
    ]
    assert len({each["id"] for each in everything}) == len(everything)
    cells = [
        (x, y)
        for each in everything
        for x in range(each["gridPos"]["x"], each["gridPos"]["x"] + each["gridPos"]["w"])
        for y in range(each["gridPos"]["y"], each["gridPos"]["y"] + each["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells), "panels lie beside each other"
    assert {x for x, _ in cells} == set(range(24))
    assert {each["name"] for each in board["templating"]["list"]} == {"datasource", "model"}
    asked = {name for panel in panels() for target in panel["targets"] for name, _ in SERIES.findall(target["expr"])}
    stems = {re.sub(r"_(bucket|count|sum)$", "", name) for name in families()} - {"up"}
    shown = {re.sub(r"_(bucket|count|sum)$", "", name) for name in asked}
    assert stems - shown == {"sloop_attainment_ratio", "sloop_node_seconds_total", "sloop_version_state"}


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.get("alert") or rule["record"])
def test_rules_ask_for_metrics_that_exist(rule: dict[str, Any]) -> None:
    labels = check_expression(rule["expr"])
    if "alert" in rule:
        used = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
        assert used <= labels
        assert rule["labels"]["severity"] in {"page", "ticket"}


def test_burn_rates_are_those_of_the_workbook() -> None:
    alerts = {rule["alert"]: rule for rule in rules() if "alert" in rule}
    for name, burn, windows in (
        ("SloopDeadlinesMissedFast", "14.4", ("1h", "5m")),
        ("SloopDeadlinesMissed", "6", ("6h", "30m")),
        ("SloopDeadlinesMissedSlowly", "1", ("3d", "6h")),
    ):
        asked = [f"sloop:requests_missed:ratio_rate{window} > {burn} * 0.01" for window in windows]
        assert alerts[name]["expr"] == " and ".join(asked)
        for window in windows:
            expression = recorded()[f"sloop:requests_missed:ratio_rate{window}"]
            assert set(re.findall(r"\[(\w+)\]", expression)) == {window}
            assert expression.endswith(f"sloop:requests:rate{window}")
    assert f"0.8 * {BODIES_BYTES_MAX}" in alerts["SloopBodiesGrow"]["expr"]


def test_the_page_explains_every_alert() -> None:
    page = (ROOT / "docs" / "deployment.md").read_text()
    named = set(re.findall(r"`(Sloop\w+)`", page))
    assert named == {rule["alert"] for rule in rules() if "alert" in rule}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
def test_the_alerts_pass_their_own_tests() -> None:
    subprocess.run(["promtool", "test", "rules", DEPLOY / "monitoring" / "alerts.test.yaml"], check=True)


@pytest.mark.skipif(shutil.which("haproxy") is None, reason="needs haproxy")
def test_haproxy_takes_its_configuration() -> None:
    subprocess.run(["haproxy", "-c", "-f", DEPLOY / "haproxy" / "haproxy.cfg"], check=True)


def test_the_server_keeps_idle_connections_longer_than_proxies() -> None:
    page = (ROOT / "docs" / "deployment.md").read_text()
    kept = {
        name: int(seconds) for name, seconds in re.findall(r"^\| ([^|]*) \| (\d+) s[^|]*\| fits", page, re.MULTILINE)
    }
    assert len(kept) >= 3
    assert all(seconds < ServerLimits().idle_s for seconds in kept.values())
    assert all(seconds < IDLE_S_MAX for seconds in kept.values())
    (_, shorter, longer) = next(
        re.finditer(r"set it to (\d+) s, or give the server `limits: {idle_s: (\d+)}`", page)
    ).group(0, 1, 2)
    assert int(shorter) < ServerLimits().idle_s
    assert int(longer) > 3600


def test_haproxy_repeats_only_what_was_not_run() -> None:
    text = read("haproxy/haproxy.cfg")
    assert re.findall(r"^ *retry-on (.*)$", text, re.MULTILINE) == ["conn-failure 503"]
    (kept_s,) = re.findall(r"timeout http-keep-alive (\d+)s", text)
    assert int(kept_s) < ServerLimits().idle_s, "HAProxy closes idle connections before the server does"
