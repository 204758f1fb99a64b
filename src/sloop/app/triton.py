"""Reads Triton's model repositories as applications: a folder for each model, with `config.pbtxt` and version folders.

A model in ONNX becomes an application of one stage, an ensemble one of several, with the same inputs and outputs. What
sloop does not take, or does in another way, becomes a note `file:line: key: why, and what to do`; a model that cannot
be taken at all is left out, with such a note. A model without `config.pbtxt` is taken as Triton completes it: its ONNX
file is enough.

Source: model_config.proto, release 24.08.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sloop.app.document import NAME
from sloop.app.text_format import read_text_format
from sloop.errors import InputError
from sloop.options import Value
from sloop.profile.model import read_signature
from sloop.tensor import Port
from sloop.text import listed

CONFIG: Final = "config.pbtxt"
MODEL: Final = "model.onnx"
TAKEN: Final = (
    *("name", "platform", "backend", "max_batch_size", "input", "output", "default_model_filename", "version_policy"),
    *("ensemble_scheduling", "instance_group", "dynamic_batching", "model_operations"),
)
"""The keys of a model that have a meaning here."""
NOT_TAKEN: Final[Mapping[str, str]] = {
    "runtime": "the runtime is ONNX Runtime",
    "optimization": "ONNX Runtime optimises each graph as far as it can",
    "parameters": "options of Triton's backend have no meaning here; a replica has as many threads as cores",
    "model_warmup": "not needed: each worker runs the model before it is ready",
    "response_cache": "there is no cache of answers; put one in front of the server",
    "metric_tags": "metrics have the labels `model` and `version`; add others where they are collected",
    "model_metrics": "buckets of histograms follow from the deadlines",
    "model_repository_agents": "agents are not run: apply what they do to the files",
    "cc_model_filenames": "one file runs on all hardware",
}
LEFT_OUT: Final[Mapping[str, str]] = {
    "sequence_batching": "no model keeps state between requests: give the state to clients, as an input and an output",
    "batch_input": "requests of different shapes are not joined: pad them to one shape",
    "batch_output": "requests of different shapes are not joined: pad them to one shape",
}
PORTS_NOT_TAKEN: Final[Mapping[str, str]] = {
    "reshape": "tensors are not reshaped: clients send and get the shapes of the model",
    "format": "clients send the layout of the model",
    "is_shape_tensor": "only TensorRT has shape tensors",
    "is_non_linear_format_io": "only TensorRT has such formats",
    "allow_ragged_batch": "requests of different shapes do not share a batch",
}
BATCHING_NOT_TAKEN: Final[Mapping[str, str]] = {
    "preferred_batch_size": "all batch sizes up to the largest of the profile are used; "
    "`sloop profile MODEL --batches 1,2,4,8` says which are measured",
    "max_queue_delay_microseconds": "there is no fixed delay: the system's batch policy waits for more requests only "
    "as long as all deadlines permit",
    "preserve_ordering": "each answer is sent when it is ready",
    **dict.fromkeys(("priority_levels", "default_priority_level"), "a shorter `x-slo-ms` makes a request more urgent"),
    **dict.fromkeys(
        ("default_queue_policy", "priority_queue_policy"),
        "`slo_ms` bounds the whole time of a request, `limits: {requests: N}` how many are open",
    ),
}
BACKENDS: Final[Mapping[str, str]] = {
    "python": "rewrite it as a stage in Python, a class `Model` with `run`",
    "tensorrt": "a TensorRT engine is for one kind of GPU: export the model as ONNX",
    "pytorch": "export it with torch.onnx.export",
    "tensorflow": "convert it with tf2onnx",
    "dali": "write this preparation of inputs as a stage in Python",
}
SUFFIXES: Final[Mapping[str, str]] = {
    ".py": "python",
    ".plan": "tensorrt",
    ".pt": "pytorch",
    ".savedmodel": "tensorflow",
    ".graphdef": "tensorflow",
    ".onnx": "onnxruntime",
}
"""By the end of a file's name, the backend that Triton takes for it."""


@dataclass(frozen=True, slots=True)
class TritonRepository:
    """What was read of a model repository."""

    applications: tuple[Value, ...]
    """The documents of applications. Their paths are absolute."""
    notes: tuple[str, ...]
    """What was not taken, and why."""


def is_repository(folder: Path) -> bool:
    """Whether a folder is a model repository, or the folder of one of its models."""
    return _is_model(folder) or any(_is_model(each) for each in _folders(folder))


def read_repository(folder: Path, slo_ms: float, *, compares: bool = False) -> TritonRepository:
    """The applications in a repository, or in the folder of one of its models. Their deadline is `slo_ms`: Triton has
    none. If it `compares`, notes say where configurations differ from the models, which are opened."""
    folder = folder if folder.name not in ("", "..") else folder.absolute()
    is_alone = _is_model(folder)
    models = _TritonModels(folder.parent if is_alone else folder)
    names = [folder.name] if is_alone else [each.name for each in _folders(folder) if _is_model(each)]
    found = {name: model for name in names if (model := models.of(name)) is not None}
    applications: list[Value] = []
    users: dict[str, str] = {}
    for name, model in found.items():
        if model.is_ensemble:
            with models.leaving_out(name):
                stages, used = _ensemble(model, models)
                applications.append(model.application(stages, slo_ms))
                users |= dict.fromkeys(used, name)
    for name, model in found.items():
        if model.is_ensemble:
            continue
        if name in users:
            model.say(
                model.config,
                f"served as a stage of {users[name]!r} only; to serve it alone too, give its folder as well",
            )
        else:
            with models.leaving_out(name):
                applications.append(model.application([model.stage(name)], slo_ms))
    if compares:
        for each in models.found.values():
            if each is not None and not each.is_ensemble:
                _compare(each)
    return TritonRepository(tuple(applications), tuple(dict.fromkeys(models.notes)))


def _in(folder: Path) -> list[Path]:
    try:
        return sorted(each for each in folder.iterdir() if not each.name.startswith("."))
    except OSError:  # there is none, or it cannot be read
        return []


def _folders(folder: Path) -> list[Path]:
    return [each for each in _in(folder) if each.is_dir()]


def _versions(folder: Path) -> list[int]:
    """The versions in the folder of a model, the newest last."""
    return sorted(int(each.name) for each in _folders(folder) if each.name.isdecimal() and each.name[0] != "0")


def _is_model(folder: Path) -> bool:
    return (folder / CONFIG).is_file() or any(_in(folder / str(each)) for each in _versions(folder))


@dataclass(slots=True)
class _TritonModel:
    """A model of a repository, and where notes about it go."""

    folder: Path
    config: Value
    """Its `config.pbtxt`; an empty mapping if it has none."""
    notes: list[str]
    labels: dict[str, str] = field(default_factory=dict)
    """By output, the file with the names of its classes."""
    outputs: dict[str, str] = field(default_factory=dict)
    """Of an ensemble, where its outputs come from: `STAGE.OUTPUT`."""

    @classmethod
    def read(cls, folder: Path, notes: list[str]) -> "_TritonModel":
        """InputError if its configuration cannot be read."""
        path = folder / CONFIG
        config = read_text_format(path) if path.is_file() else Value({}, "", str(folder))
        model = cls(folder.absolute(), config, notes)
        for key, value in config.mapping().items():
            if key in LEFT_OUT:
                value.fail("not supported", LEFT_OUT[key])
            elif key in NOT_TAKEN:
                model.say(value, NOT_TAKEN[key])
            elif key == "model_transaction_policy":
                decoupled = value.mapping().get("decoupled")
                if decoupled is not None and decoupled.boolean():
                    decoupled.fail("each request has one answer", "send all outputs in one answer")
            elif key not in TAKEN:
                model.say(value, "unknown here, and without effect")
        model._say_replicas()
        batching = config.mapping().get("dynamic_batching")
        model._say_keys(batching, BATCHING_NOT_TAKEN)
        for port in (*model.ports("input"), *model.ports("output")):
            fields = port.mapping(required=("name",))
            _ = fields["name"].text(), "data_type" in fields and fields["data_type"].text(), _dims(fields)
            model._say_keys(port, PORTS_NOT_TAKEN)
        model.labels = {
            port.mapping()["name"].text(): str(model.folder / file.text())
            for port in model.ports("output")
            if (file := port.mapping().get("label_filename")) is not None
        }
        if not model.is_ensemble:
            model.check()
            _ = model.file, model.name
        return model

    def say(self, value: Value, what: str) -> None:
        """Note something about a value of the configuration."""
        self.notes.append(f"{value.where}: {what}")

    def ports(self, key: str) -> list[Value]:
        """Its declared inputs or outputs."""
        return self.config.mapping()[key].one_or_more() if key in self.config.mapping() else []

    def _say_keys(self, value: Value | None, known: Mapping[str, str]) -> None:
        for key, each in value.mapping().items() if value is not None else ():
            if key in known:
                self.say(each, known[key])

    def _say_replicas(self) -> None:
        if "instance_group" not in self.config.mapping():
            return
        groups = self.config.mapping()["instance_group"].one_or_more()
        counts = [each.mapping()["count"].integer(least=1) if "count" in each.mapping() else 1 for each in groups]
        self.say(
            self.config.mapping()["instance_group"],
            f"the system decides how many replicas run; to have {sum(counts)} at all times: `system: {{name: static, "
            f"replicas: {sum(counts)}}}`",
        )
        for each in groups:
            kind = each.mapping().get("kind")
            if kind is not None and kind.content == "KIND_GPU":
                self.say(kind, "a model runs on a GPU if it was measured there: `sloop profile MODEL --device cuda`")

    @property
    def name(self) -> str:
        """InputError if it cannot be part of a URL."""
        given = self.config.mapping().get("name")
        value = given if given is not None and given.content else Value(self.folder.name, "name", self.config.file)
        if not NAME.fullmatch(value.text()):
            value.fail("not a name here", "use letters, digits, '.', '_' and '-' only, at most 100")
        return value.text()

    @property
    def is_ensemble(self) -> bool:
        fields = self.config.mapping()
        platform = fields.get("platform")
        return "ensemble_scheduling" in fields or (platform is not None and platform.content == "ensemble")

    def check(self) -> None:
        """InputError if another backend than ONNX Runtime runs it."""
        fields = self.config.mapping()
        given = next((fields[key] for key in ("backend", "platform") if key in fields and fields[key].content), None)
        value = given if given is not None else self.config
        backend = given.text() if given is not None else self._guessed()
        backend = next((each for each in (*BACKENDS, "onnxruntime") if backend.startswith(each)), backend)
        if backend != "onnxruntime":
            value.fail(f"models of {backend} are not run", BACKENDS.get(backend, "export it as ONNX"))

    def _guessed(self) -> str:
        """The backend that Triton takes for the files of the newest version."""
        there = _in(self.folder / str(max(_versions(self.folder), default=0)))
        found = {SUFFIXES[each.suffix] for each in there if each.suffix in SUFFIXES}
        return "onnxruntime" if "onnxruntime" in found or not found else min(found)

    @property
    def file(self) -> Path:
        """The ONNX file of the version that is served. InputError if there is none."""
        return self.file_of(self._version())

    def file_of(self, version: int) -> Path:
        """The ONNX file of a version. InputError if there is none."""
        declared = self.config.mapping().get("default_model_filename")
        there = _in(self.folder / str(version))
        names = [declared.text()] if declared is not None and declared.content else [MODEL]
        path = self.folder / str(version) / names[0]
        models = [each for each in there if each.suffix == ".onnx"]
        if len(models) == 1 and names == [MODEL]:
            path = models[0]
        path = path / MODEL if path.is_dir() else path  # with files of weights beside it
        where = declared if declared is not None else self.config
        if not path.is_file():
            has = f"it has {listed([each.name for each in there])}" if there else "there is no such folder"
            where.fail(f"version {version} has no {path.name!r}", has)
        if path.suffix != ".onnx":
            where.fail(f"{path.name!r} does not end in .onnx", "rename the file")
        return path

    def _version(self) -> int:
        """The newest version, of those that the version policy names if it names any."""
        versions = _versions(self.folder)
        policy = self.config.mapping().get("version_policy")
        fields = policy.mapping() if policy is not None else {}
        if "specific" in fields:
            named = fields["specific"].mapping(required=("versions",))["versions"].one_or_more()
            versions = [each for each in versions if each in [value.integer() for value in named]]
        if not versions:
            at = policy if policy is not None else self.config
            at.fail("no version to serve", "add a folder 1 with the model, or correct the policy")
        if policy is not None:
            self.say(policy, "the newest version is served; `sloop deploy --canary` serves another beside it")
        return versions[-1]

    def stage(self, name: str, version: int | None = None) -> dict[str, object]:
        """A stage that runs this model."""
        stage: dict[str, object] = {"name": name, "model": str(self.file if version is None else self.file_of(version))}
        batch = self.config.mapping().get("max_batch_size")
        if batch is not None and batch.integer(least=0) == 0:
            stage["batch"] = False
        operations = self.config.mapping().get("model_operations")
        if operations is not None and "op_library_filename" in operations.mapping():
            names = operations.mapping()["op_library_filename"].one_or_more()
            stage["operators"] = [str((self.folder / each.text()).absolute()) for each in names]
        return stage

    def application(self, stages: list[dict[str, object]], slo_ms: float) -> Value:
        """The document of an application with these stages."""
        document: dict[str, object] = {"name": self.name, "slo_ms": slo_ms, "stages": stages}
        batch = self.config.mapping().get("max_batch_size")
        rows = batch.integer(least=0) if batch is not None else 0
        if batch is not None and rows:
            document["limits"] = {"rows": rows}
            sizes = ",".join(map(str, [*(2**power for power in range((rows - 1).bit_length())), rows]))
            what = f"taken as the most rows of a request (`limits: {{rows: {rows}}}`); the largest batch is that of the"
            self.say(batch, f"{what} profile: `sloop profile MODEL --batches {sizes}`")
        if self.outputs:
            document["outputs"] = self.outputs
        if self.labels:
            document["labels"] = dict(self.labels)
        has_config = (self.folder / CONFIG).is_file()
        return Value(document, "", self.config.file if has_config else str(self.file))


class _TritonModels:
    """The models of a repository, each read once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: list[str] = []
        self.found: dict[str, _TritonModel | None] = {}

    def of(self, name: str) -> _TritonModel | None:
        """The model called `name`; None if there is none, or it is left out, which a note then says."""
        if name not in self.found:
            self.found[name] = None
            if NAME.fullmatch(name) and _is_model(self.folder / name):
                with self.leaving_out(name):
                    self.found[name] = _TritonModel.read(self.folder / name, self.notes)
        return self.found[name]

    @contextmanager
    def leaving_out(self, name: str) -> Iterator[None]:
        """Turn an InputError into a note that the model is left out."""
        try:
            yield
        except InputError as error:
            why = "; ".join(part for part in (str(error.args[0]), error.help) if part)
            self.notes.append(f"{why}; model {name!r} is left out")


# Ensembles


def _ensemble(
    ensemble: _TritonModel, models: _TritonModels, within: tuple[str, ...] = ()
) -> tuple[list[dict[str, object]], set[str]]:
    """The stages of an ensemble, and the models that they run; those of an ensemble within it have its step's name
    before theirs. `within` are the ensembles around it. InputError if they cannot be served."""
    scheduling = ensemble.config.mapping(required=("ensemble_scheduling",))["ensemble_scheduling"]
    steps = scheduling.mapping(required=("step",))["step"].one_or_more()
    fields = [step.mapping(required=("model_name", "output_map")) for step in steps]
    names = _stage_names([each["model_name"].text() for each in fields])
    own = [_step(name, each, models, (*within, ensemble.name)) for name, each in zip(names, fields, strict=True)]
    sources = {port.mapping()["name"].text(): ("", "") for port in ensemble.ports("input")}
    for each, step in zip(fields, own, strict=True):
        for output, tensor in _entries(each["output_map"]):
            if tensor.text() in sources:
                tensor.fail("two steps give this tensor, or clients send it too", "give it another name")
            sources[tensor.text()] = step.source(output, tensor)
    stages: list[dict[str, object]] = []
    labels: dict[tuple[str, str], str] = {}
    for each, step in zip(fields, own, strict=True):
        labels |= {step.source(output, each["output_map"]): file for output, file in step.model.labels.items()}
        given: dict[str, tuple[str, str]] = {}
        for input, tensor in _entries(each["input_map"]) if "input_map" in each else ():
            if tensor.text() not in sources:
                tensor.fail(
                    "no step gives this tensor, and clients do not send it", f"known: {listed([*sources], 'or')}"
                )
            source, output = sources[tensor.text()]
            given[input] = (source, output) if source else ("", tensor.text())
        stages += [_fed(stage, inputs, given) for stage, inputs in step.stages]
    ensemble.outputs = _outputs(ensemble, sources, labels)
    return stages, {name for step in own for name in step.runs}


Fed = Mapping[str, tuple[str, str]]
"""By input, the stage and output that it comes from, or "" and what clients send."""


@dataclass(frozen=True, slots=True)
class _EnsembleStep:
    """A step of an ensemble: a stage, or those of an ensemble within it."""

    name: str
    model: _TritonModel
    stages: list[tuple[dict[str, object], Fed | None]]
    """Each with its inputs, as the step's own; None for those of the step."""
    runs: set[str]
    """The models that it runs."""

    def source(self, output: str, at: Value) -> tuple[str, str]:
        """The stage that gives an output of the step, and the output's name there."""
        if not self.model.is_ensemble:
            return self.name, output
        if output not in self.model.outputs:
            at.fail(f"{self.model.name} has no output {output!r}", f"it has {listed([*self.model.outputs])}")
        stage, _, inner = self.model.outputs[output].partition(".")
        return f"{self.name}-{stage}", inner


def _step(name: str, fields: Mapping[str, Value], models: _TritonModels, within: tuple[str, ...]) -> _EnsembleStep:
    value = fields["model_name"]
    model = models.of(value.text())
    if model is None:
        value.fail("the model of this step is missing, or left out", "write a stage for it in the application file")
    if not model.is_ensemble:
        version = fields["model_version"].integer() if "model_version" in fields else -1
        return _EnsembleStep(name, model, [(model.stage(name, version if version > 0 else None), None)], {value.text()})
    if model.name in within:
        value.fail("an ensemble that contains itself", "remove the step")
    stages, runs = _ensemble(model, models, within)
    return _EnsembleStep(name, model, [_prefixed(name, stage) for stage in stages], runs)


def _prefixed(name: str, stage: Mapping[str, object]) -> tuple[dict[str, object], Fed]:
    """A stage of an ensemble within another, with the step's name before its own, and where its inputs come from."""
    made = {key: value for key, value in stage.items() if key not in ("after", "inputs")}
    declared, after = stage.get("inputs", {}), stage.get("after", [])
    assert isinstance(declared, dict)
    assert isinstance(after, list)
    inputs: dict[str, tuple[str, str]] = {}
    for input, text in declared.items():
        source, dot, output = text.partition(".")
        inputs[input] = (f"{name}-{source}", output) if dot and source in after else ("", text)
    return made | {"name": f"{name}-{stage['name']}"}, inputs


def _fed(stage: dict[str, object], inputs: Fed | None, given: Fed) -> dict[str, object]:
    """A stage with its inputs. Those of an ensemble within another get what clients would send it from the step."""
    if inputs is None:
        inputs = given
    else:
        inputs = {input: source if source[0] else given.get(source[1], source) for input, source in inputs.items()}
    after = dict.fromkeys(source for source, _ in inputs.values() if source)
    texts = {input: f"{source}.{output}" if source else output for input, (source, output) in inputs.items()}
    return stage | ({"after": list(after)} if after else {}) | ({"inputs": texts} if texts else {})


def _outputs(
    ensemble: _TritonModel, sources: Mapping[str, tuple[str, str]], labels: Mapping[tuple[str, str], str]
) -> dict[str, str]:
    """Where an ensemble's outputs come from. Those without labels of their own have those of its models."""
    found: dict[str, str] = {}
    for port in ensemble.ports("output"):
        tensor = port.mapping()["name"]
        stage, output = source = sources.get(tensor.text(), ("", ""))
        if not stage:
            given = [tensor for tensor, (step, _) in sources.items() if step]
            tensor.fail("no step gives this tensor", f"steps give {listed(given)}")
        found[tensor.text()] = f"{stage}.{output}"
        if source in labels:
            ensemble.labels.setdefault(tensor.text(), labels[source])
    return found


def _stage_names(models: Sequence[str]) -> list[str]:
    """Names of stages that run these models: as the models, with numbers where one has several stages."""
    numbers: Counter[str] = Counter()
    numbers.update(models)
    seen: Counter[str] = Counter()
    names = []
    for model in models:
        seen[model] += 1
        names.append(model if numbers[model] == 1 else f"{model}-{seen[model]}")
    return names


def _entries(value: Value) -> list[tuple[str, Value]]:
    """The entries of a map: by the model's own name, the tensor of the ensemble."""
    fields = [each.mapping(required=("key", "value")) for each in value.one_or_more()]
    return [(each["key"].text(), each["value"]) for each in fields]


# Comparison with the models


def _compare(model: _TritonModel) -> None:
    """Say where a configuration differs from the model itself."""
    try:
        signature = read_signature(model.file)
    except InputError as error:
        model.say(model.config, f"not compared with the model, which cannot be opened here: {error.args[0]}")
        return
    batch = model.config.mapping().get("max_batch_size")
    rows = (-1,) if batch is not None and batch.integer(least=0) else ()
    for key, own in (("input", (*signature.inputs, *signature.optional)), ("output", signature.outputs)):
        ports = {port.name: port for port in own}
        for value in model.ports(key):
            fields = value.mapping()
            name = fields["name"].text()
            if name not in ports:
                model.say(fields["name"], f"the model has no {key} of this name; it has {listed([*ports])}")
            else:
                _compare_port(model, fields, ports[name], rows)


def _dims(fields: Mapping[str, Value]) -> list[int]:
    return [each.integer(least=-1) for each in fields["dims"].one_or_more()] if "dims" in fields else []


def _compare_port(model: _TritonModel, fields: Mapping[str, Value], port: Port, rows: tuple[int, ...]) -> None:
    if "data_type" in fields:
        datatype = fields["data_type"].text().removeprefix("TYPE_").replace("STRING", "BYTES")
        if datatype != port.datatype:
            model.say(fields["data_type"], f"the model has {port.datatype}, which holds")
    if "dims" not in fields or "reshape" in fields:
        return
    dims = (*rows, *_dims(fields))
    pairs = list(zip(dims, port.shape, strict=False))
    if len(dims) != len(port.shape) or any(-1 not in pair and pair[0] != pair[1] for pair in pairs):
        model.say(fields["dims"], f"{list(dims)} with the batch; the model has {list(port.shape)}, which holds")
    elif any(mine != -1 and own == -1 for mine, own in pairs[1:]):
        sizes = ",".join(str(each) for each in (dims[1:] if port.shape[:1] == (-1,) else dims))
        what = (
            f"the model has {list(port.shape)}: these sizes are for `--shape {port.name}={sizes}` of profile and serve"
        )
        model.say(fields["dims"], what)
