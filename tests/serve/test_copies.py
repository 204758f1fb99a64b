"""Private copies of models: a version goes on with the bytes that were examined, whatever becomes of users' files."""

import errno
import json
import os
import py_compile
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import yaml
from onnx import TensorProto

from sloop.actions import ResizeWorker
from sloop.errors import InputError
from sloop.events import Removed
from sloop.profile.examine import examine
from sloop.profile.model import open_model, read_signature
from sloop.profile.profile import digest, digest_of_model
from sloop.serve import copies
from sloop.serve.control.orders import Deploy, find_server, send
from sloop.serve.control.servables import COPIES
from sloop.serve.copies import (
    VersionFiles,
    check_digest,
    collect,
    open_checked,
    private_copy,
    take,
)
from sloop.serve.node.node import LiveNode
from sloop.serve.runtimes import FileRuntime, check_offer
from sloop.serve.weights.folder import FILES, USED, locked_file
from sloop.tensor import Port, Signature
from sloop.vocabulary import Canary
from tests.onnx_graphs import onnx_model
from tests.serve.edge.fakes import LoopThread
from tests.serve.test_server import Running

X = np.zeros((1, 4), np.float32)


def adding(path: Path, value: float, *, rows: int | str = "rows", data: tuple[str, ...] = (), width: int = 4) -> Path:
    """y = x + value / 2 + value / 2, with both weights in other files if there are names for them."""
    halves = dict.fromkeys("ab", np.full(width, value / 2, np.float32))
    graph = f"(float[{rows}, {width}] x) => (float[{rows}, {width}] y) {{ h = Add(x, a) y = Add(h, b) }}"
    made = onnx_model(graph, halves)
    path.parent.mkdir(parents=True, exist_ok=True)
    for weight, name in zip(made.graph.initializer, data * (2 // len(data)) if data else (), strict=False):
        file = path.parent / name
        file.parent.mkdir(parents=True, exist_ok=True)
        before = file.read_bytes() if len(data) == 1 and weight.name == "b" else b""
        file.write_bytes(before + weight.raw_data)
        given = {"location": name, "offset": str(len(before)), "length": str(len(weight.raw_data))}
        weight.external_data.extend(onnx.StringStringEntryProto(key=key, value=text) for key, text in given.items())
        weight.ClearField("raw_data")
        weight.data_location = TensorProto.EXTERNAL
    path.write_bytes(made.SerializeToString())
    return path


def hugging_face(folder: Path, value: float, rows: int | str = "rows") -> Path:
    """The layout of its cache: names that are links to files whose names are digests."""
    blobs, names = folder / "blobs", folder / "snapshots" / "1"
    adding(blobs / "model.onnx", value, rows=rows, data=("model.onnx.data",))
    names.mkdir(parents=True)
    for name, blob in (("model.onnx", "aaa"), ("model.onnx.data", "bbb")):
        (blobs / name).rename(blobs / blob)
        (names / name).symlink_to(f"../../blobs/{blob}")
    return names / "model.onnx"


def said(path: Path | str) -> float:
    """What an added model answers to 0."""
    return float(open_model(Path(path), 1).run({"x": X})[0][0, 0])


CODE = """
from pathlib import Path
import helper_{0}
class Model:
    inputs = {{"x": ("FP32", (-1, 4))}}
    outputs = {{"y": ("FP32", (-1, 4))}}
    joins_rows = True
    def __init__(self, threads):
        from package_{0}.inner import TEN
        self.add = helper_{0}.ADD + TEN + float((Path(__file__).parent / "data.txt").read_text())
    def run(self, x):
        return x + self.add
"""


SAID = """
import sys
from pathlib import Path
from tests.serve.test_copies import said
print(said(Path(sys.argv[1])))
"""
"""What a process says that has opened nothing before."""


def python_model(folder: Path, name: str, add: float = 1) -> Path:
    """y = x + add + 10 + 100: the first in a module beside it, the second in a package, the third in a file of data."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"helper_{name}.py").write_text(f"from package_{name} import inner\nADD = {add}\n")
    package = folder / f"package_{name}"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text("from .deep import TEN\n")
    (package / "deep.py").write_text("TEN = 10\n")
    (folder / "unused.py").write_text("1 / 0\n")
    (folder / "data.txt").write_text("100")
    path = folder / "model.py"
    path.write_text(CODE.format(name))
    return path


# Copies


def test_a_copy_has_all_files_and_the_digest_of_the_profile(tmp_path: Path) -> None:
    model = adding(tmp_path / "user" / "m.onnx", 3, data=("one.bin", "deep/two.bin"))
    copy = take(model, tmp_path / "store")
    assert copy.path.parent == copy.folder != model.parent
    assert sorted(str(file.relative_to(copy.folder)) for file in copy.folder.rglob("*.*")) == [
        "deep/two.bin",
        "m.onnx",
        "one.bin",
    ]
    assert copy.digest == digest_of_model(model) == digest_of_model(copy.path)
    assert [file.stat().st_nlink for file in copy.folder.rglob("*.*")] == [1, 1, 1], "`cp` writes into the same inode"
    assert take(model, tmp_path / "store").path == copy.path, "it is made once"
    shutil.rmtree(model.parent)
    assert said(copy.path) == 3


def test_names_are_what_is_opened_also_if_they_are_links(tmp_path: Path) -> None:
    model = hugging_face(tmp_path / "hub", 5, rows=1)
    copy = take(model, tmp_path / "store")
    assert said(copy.path) == 5
    assert not copy.path.is_symlink()
    blob = tmp_path / "hub" / "blobs" / "bbb"
    blob.write_bytes(np.full(8, 7, np.float32).tobytes())
    assert digest_of_model(model) != copy.digest, "a digest covers weights behind links"
    assert said(copy.path) == 5


def test_weights_beside_the_file_that_a_link_leads_to_are_found(tmp_path: Path) -> None:
    model = adding(tmp_path / "real" / "m.onnx", 5, data=("m.data",))
    (tmp_path / "link.onnx").symlink_to(model)
    copy = take(tmp_path / "link.onnx", tmp_path / "store")
    assert (said(copy.path), copy.digest) == (5, digest_of_model(model))
    assert digest_of_model(tmp_path / "link.onnx") == copy.digest
    assert open_checked(tmp_path / "link.onnx", 1, copy.digest).run({"x": X})[0][0, 0] == 5
    adding(tmp_path / "elsewhere.onnx", 6, data=("m.data",))
    assert said(take(tmp_path / "link.onnx", tmp_path / "store").path) == 6, "those beside the name come first"


def test_modules_beside_a_python_file_are_kept_and_find_its_data(tmp_path: Path) -> None:
    model = python_model(tmp_path / "user", "kept")
    copy = take(model, tmp_path / "store")
    assert {file.name for file in copy.folder.rglob("*.py")} == {
        "model.py",
        "helper_kept.py",
        "__init__.py",
        "inner.py",
        "deep.py",
    }
    python_model(tmp_path / "user", "kept", add=2)
    model.write_text("this is no Python")
    assert said(copy.path) == 111
    assert said(copy.path) == 111, "a second session"
    again = take(python_model(tmp_path / "user", "kept", add=2), tmp_path / "store")
    assert again.path != copy.path
    assert said(again.path) == 112
    assert said(copy.path) == 111


def test_packages_without_a_file_and_cached_bytecode(tmp_path: Path) -> None:
    """Of the user's file as it is now, which is newer than the copy."""
    model, inner = tmp_path / "user" / "model.py", tmp_path / "user" / "bare_package" / "inner.py"
    inner.parent.mkdir(parents=True)
    inner.write_text("TEN = 10\n")
    text = CODE.format("bare").replace("import helper_bare", "import bare_package.inner")
    model.write_text(text.replace("helper_bare.ADD + TEN", "TEN").replace("package_bare", "bare_package"))
    (model.parent / "data.txt").write_text("100")
    copy = take(model, tmp_path / "store")
    inner.write_text("TEN = 20\n")
    py_compile.compile(str(inner))
    assert said(copy.path) == 110
    (model.parent / "data.txt").rename(tmp_path / "data.txt")
    shutil.rmtree(model.parent)
    model.parent.mkdir()
    (tmp_path / "data.txt").rename(model.parent / "data.txt")
    done = subprocess.run([sys.executable, "-c", SAID, str(copy.path)], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["110.0"], done.stderr


def test_errors_name_the_users_file_and_line(tmp_path: Path) -> None:
    model = tmp_path / "broken.py"
    model.write_text("import math\n1 / 0\n")
    with (
        pytest.raises(InputError, match="division by zero") as caught,
        private_copy(model, tmp_path / "store") as copy,
    ):
        open_model(copy.path, 1)
    assert caught.value.where == f"{model}:2"
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"nothing")
    with (
        pytest.raises(InputError, match="not an ONNX model") as caught,
        private_copy(broken, tmp_path / "store") as copy,
    ):
        open_model(copy.path, 1)
    assert caught.value.where == str(broken)
    assert str(tmp_path / "store") not in str(caught.value)
    incomplete = adding(tmp_path / "incomplete.onnx", 1, data=("w.bin",))
    (tmp_path / "w.bin").unlink()
    with (
        pytest.raises(InputError, match=str(tmp_path / "w.bin")),
        private_copy(incomplete, tmp_path / "store") as copy,
    ):
        open_model(copy.path, 1)
    with pytest.raises(InputError, match="there is no such file"):
        take(tmp_path / "none.onnx", tmp_path / "store")


def test_a_file_that_changes_while_it_is_copied_is_copied_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = adding(tmp_path / "m.onnx", 1)
    copying, turns = copies._copy, list[int]()

    def changes(given: Any, made: Any) -> None:
        if len(turns) < limit:
            turns.append(1)
            adding(model, 1 + len(turns))
        copying(given, made)

    monkeypatch.setattr(copies, "_copy", changes)
    limit = 1
    copy = take(model, tmp_path / "store")
    assert (said(copy.path), copy.digest) == (2, digest(model))
    limit = 99
    adding(model, 50)
    with pytest.raises(InputError, match="changes while it is copied"):
        take(model, tmp_path / "store")
    assert [entry.name for entry in (tmp_path / "store").iterdir()] == [copy.folder.parent.name], "nothing is left"


def test_a_damaged_copy_is_made_again(tmp_path: Path) -> None:
    model = adding(tmp_path / "m.onnx", 4)
    copy = take(model, tmp_path / "store")
    copy.path.chmod(0o644)
    copy.path.write_bytes(b"the disk was full, or the power failed")
    again = take(model, tmp_path / "store")
    assert again.path == copy.path
    assert said(again.path) == 4


def test_several_take_the_same_model_at_once(tmp_path: Path) -> None:
    model = adding(tmp_path / "m.onnx", 6)
    taken: list[Path] = []
    ready = threading.Barrier(6)

    def one() -> None:
        ready.wait()
        taken.append(take(model, tmp_path / "store").path)

    threads = [threading.Thread(target=one) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 6
    assert len(set(taken)) == 1
    assert said(taken[0]) == 6
    assert len(list((tmp_path / "store").iterdir())) == 1


def test_what_nobody_uses_is_deleted(tmp_path: Path) -> None:
    store = tmp_path / "store"
    first, second = (take(adding(tmp_path / "m.onnx", value), store) for value in (1, 2))
    left = store / "m.onnx.blocks-of-an-earlier-sloop"
    left.mkdir()
    (store / "young.part").mkdir()
    os.utime(left, (0, 0))
    collect(store)
    assert {entry.name for entry in store.iterdir()} == {
        first.folder.parent.name,
        second.folder.parent.name,
        "young.part",
    }
    first.close()
    collect(store)
    assert not first.path.exists()
    assert said(second.path) == 2
    second.close()


# No room


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no room for copies."""
    monkeypatch.setattr(copies, "_copy", _refuses)


def _refuses(given: Any, made: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("data", [(), ("m.data",), ("one.bin", "deep/two.bin")])
def test_without_room_the_file_itself_is_read_and_checked(tmp_path: Path, data: tuple[str, ...]) -> None:
    model = adding(tmp_path / "m.onnx", 3, data=data)
    copy = take(model, tmp_path / "store")
    assert (copy.path, copy.digest) == (model, digest_of_model(model))
    assert "no room" in copy.why_not
    runtime = FileRuntime(str(model), read_signature(model), copy.digest)
    runtime.load(1)
    before = [(tmp_path / name).read_bytes() for name in data]
    for name in data:
        (tmp_path / name).write_bytes(bytes(len(before[0])))  # in place, so that what is mapped would change
    model.write_bytes(model.read_bytes() if data else adding(tmp_path / "other.onnx", 9).read_bytes())
    assert runtime.run([X], 1)[0][0][0, 0] == 3
    with pytest.raises(InputError, match="it has changed since") as caught:
        runtime.load(2)
    assert caught.value.where == str(model)
    with pytest.raises(InputError, match=r"has the digest .*, and what was examined had"):
        check_digest(model, copy.digest)


@pytest.mark.usefixtures("full")
def test_without_room_python_is_checked(tmp_path: Path) -> None:
    model = python_model(tmp_path, "checked")
    copy = take(model, tmp_path / "store")
    assert copy.path == model
    assert open_checked(model, 1, copy.digest).run({"x": X})[0][0, 0] == 111
    (tmp_path / "package_checked" / "deep.py").write_text("TEN = 20\n")
    with pytest.raises(InputError, match="it has changed since"):
        open_checked(model, 1, copy.digest)
    with pytest.raises(InputError, match="it has changed since"), private_copy(model, tmp_path / "store"):
        model.write_text(model.read_text() + "\n")


def test_a_copy_leaves_room_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = adding(tmp_path / "m.onnx", 3)

    class Disk:
        f_frsize = 1
        f_bavail = model.stat().st_size * 2 - 1

    monkeypatch.setattr(os, "fstatvfs", lambda fd: Disk)
    monkeypatch.setattr(copies, "FICLONE", 0)  # no request that a kernel knows
    assert take(model, tmp_path / "store").path == model
    Disk.f_bavail += 1
    assert take(model, tmp_path / "store").path != model


def test_copies_that_nobody_uses_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were taken since the process began are about to be used."""
    store = tmp_path / "store"
    old, used, new = (take(adding(tmp_path / f"{name}.onnx", 3), store) for name in ("old", "used", "new"))
    for copy in (old, used):
        os.utime(copy.folder.parent / USED, (1, 1))
    for copy in (old, new):
        copy.close()
    copying = copies._copy

    def needs_room(given: Any, made: Any) -> None:
        if old.path.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        copying(given, made)

    monkeypatch.setattr(copies, "_copy", needs_room)
    more = take(adding(tmp_path / "more.onnx", 3), store)
    assert more.path != tmp_path / "more.onnx"
    assert [copy.path.exists() for copy in (old, used, new, more)] == [False, True, True, True]


def test_weights_outside_of_the_folder_cannot_be_copied(tmp_path: Path) -> None:
    model = adding(tmp_path / "user" / "m.onnx", 3, data=("../weights.bin",))
    copy = take(model, tmp_path / "store")
    assert copy.path == model
    assert "../weights.bin lie outside of its folder" in copy.why_not
    assert open_checked(model, 1, copy.digest).run({"x": X})[0][0, 0] == 3


def test_where_nothing_can_be_written_the_file_itself_is_opened(tmp_path: Path) -> None:
    model = adding(tmp_path / "m.onnx", 3, rows=1)
    (tmp_path / "file").write_text("")
    with private_copy(model, tmp_path / "file" / "models") as copy:
        assert copy.path == model
        assert copy.why_not == f"it cannot be copied (Not a directory) to {tmp_path / 'file' / 'models'}"
        known = examine(copy.path, folder=copy.folder)
    assert known.file == str(model)
    assert "cannot be written" in known.obstacle


def test_a_changed_copy_outlives_the_shortage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version whose model was opened itself, except for the changed copy of it, serves when there is room again."""
    model = adding(tmp_path / "m.onnx", 3, rows=1)
    with monkeypatch.context() as patched:
        patched.setattr(copies, "_copy", _refuses)
        first = take(model, tmp_path / "store")
        known = examine(first.path, folder=first.folder)
    assert (first.path, Path(known.file).parent) == (model, first.folder)
    second = take(model, tmp_path / "store")
    assert second.path != model
    assert said(known.file) == said(second.path) == 3


def test_a_copy_may_be_read_by_its_owner_only(tmp_path: Path) -> None:
    for mode in (0o600, 0o644, 0o444):
        model = adding(tmp_path / f"{mode}.onnx", mode)
        model.chmod(mode)
        copy = take(model, tmp_path / "store")
        assert copy.path.stat().st_mode & 0o777 == 0o400
        for folder in (copy.folder.parent, tmp_path / "store"):
            assert folder.stat().st_mode & 0o777 == 0o700


# What a file offers


def test_a_file_that_offers_something_else_is_refused(tmp_path: Path) -> None:
    model = adding(tmp_path / "m.onnx", 3, width=5)
    examined = read_signature(adding(tmp_path / "four.onnx", 3))
    with pytest.raises(InputError) as caught:
        FileRuntime(str(model), examined).load(1)
    assert str(caught.value).startswith(
        f"{model}: its inputs are x FP32[-1, 5]; those that were examined are x FP32[-1, 4]"
    )


@pytest.mark.parametrize(
    ("port", "fits"),
    [
        (Port("y", "FP32", (-1, 4)), True),
        (Port("y", "FP32", (-1, -1)), True),
        (Port("y", "FP32", (8, 4)), True),
        (Port("y", "FP32", ()), True),
        (Port("y", "FP32", (-1, 5)), False),
        (Port("y", "FP32", (-1, 4, 1)), False),
        (Port("y", "FP64", (-1, 4)), False),
        (Port("z", "FP32", (-1, 4)), False),
    ],
)
def test_sizes_that_only_one_side_knows_do_not_matter(port: Port, fits: bool) -> None:
    x, y = Port("x", "FP32", (-1, 4)), Port("y", "FP32", (-1, 4))
    offered, examined = Signature.of((x,), (port,)), Signature.of((x,), (y,))
    if fits:
        check_offer(Path("m.onnx"), offered, examined)
    else:
        with pytest.raises(InputError, match=r"its outputs are .*; those that were examined are y FP32"):
            check_offer(Path("m.onnx"), offered, examined)
    with pytest.raises(InputError, match="its outputs"):
        check_offer(Path("m.onnx"), Signature.of((x,), (y, y)), examined)


# Changes that are noticed


@pytest.fixture
def files(tmp_path: Path) -> Iterator[VersionFiles]:
    made = VersionFiles(tmp_path / "store")
    yield made
    made.close()


def looked_twice(files: VersionFiles) -> list[str]:
    return [*files.changes(), *files.changes()]


Change = Callable[[Path], object]


def _replaced_by_cp(model: Path) -> None:
    model.write_bytes(adding(model.with_name("new.onnx"), 2, data=("new.data",)).read_bytes())


def _replaced_by_mv(model: Path) -> None:
    adding(model.with_name("new.onnx"), 2, data=("new.data",)).rename(model)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (_replaced_by_cp, "m.onnx has changed"),
        (_replaced_by_mv, "m.onnx has changed"),
        (lambda model: model.with_name("m.data").write_bytes(bytes(32)), "m.data has changed"),
        (lambda model: os.truncate(model, 40), "m.onnx has changed"),
        (lambda model: model.unlink(), "m.onnx is gone"),
    ],
)
def test_a_change_is_said_once(tmp_path: Path, files: VersionFiles, change: Change, what: str) -> None:
    model = adding(tmp_path / "m.onnx", 1, data=("m.data",))
    copy = take(model, tmp_path / "store")
    files.add("key", "version 1 of 'm'", {str(copy.path): copy.files})
    assert files.changes() == []
    os.utime(model, (1, 1))
    assert looked_twice(files) == [], "it was only touched"
    change(model)
    assert files.changes() == [], "it may still be written"
    (line,) = files.changes()
    assert what in line
    assert "version 1 of 'm' goes on with what was examined" in line
    assert "`sloop deploy`" in line
    assert looked_twice(files) == []
    adding(model, 1, data=("m.data",))
    assert looked_twice(files) == [], "it is as it was examined again"
    files.drop("key")
    change(model)
    assert looked_twice(files) == []


def test_a_link_that_is_switched_is_a_change(tmp_path: Path, files: VersionFiles) -> None:
    """As Kubernetes does with mounted ConfigMaps and Secrets."""
    for number in (1, 2):
        adding(tmp_path / f"..{number}" / "m.onnx", number)
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "m.onnx").symlink_to("..data/m.onnx")
    copy = take(tmp_path / "m.onnx", tmp_path / "store")
    files.add("key", "version 1 of 'm'", {str(copy.path): copy.files})
    (tmp_path / "new").symlink_to("..2")
    (tmp_path / "new").rename(tmp_path / "..data")
    shutil.rmtree(tmp_path / "..1")
    (line,) = looked_twice(files)
    assert line.startswith(f"{tmp_path / 'm.onnx'} has changed")
    assert said(copy.path) == 1


def test_a_file_without_a_copy_is_told_to_stop_starts(tmp_path: Path, files: VersionFiles, full: None) -> None:
    model = adding(tmp_path / "m.onnx", 1)
    copy = take(model, tmp_path / "store")
    files.add("key", "version 1 of 'm'", {str(copy.path): copy.files})
    model.unlink()
    (line,) = looked_twice(files)
    assert "it has no copy, so no worker that starts now can open it" in line


def test_a_long_name_has_a_copy(tmp_path: Path) -> None:
    model = adding(tmp_path / f"{'é' * 124}.onnx", 3)
    copy = take(model, tmp_path / "store")
    assert copy.path.name == model.name
    assert said(copy.path) == 3


def test_versions_keep_their_copies(tmp_path: Path, files: VersionFiles) -> None:
    store = tmp_path / "store"
    kept = []
    for value in (1, 2):
        with private_copy(adding(tmp_path / "m.onnx", value), store) as copy:
            files.add(f"{value}", f"version {value} of 'm'", {str(copy.path): copy.files})
            kept.append(copy.path)
    collect(store)
    assert [said(path) for path in kept] == [1, 2]
    files.drop("1")
    collect(store)
    assert [path.exists() for path in kept] == [False, True]
    lock = locked_file(kept[1].parent.parent / USED, exclusive=True)
    assert (lock, kept[1].parent.name) == (None, FILES)


# In a running server


def application(model: Path, *, cores: float = 1) -> dict[str, object]:
    profile = {"latency_ms": {"form": "quadratic", "alpha": 0, "beta": 0.1, "gamma": 1}, "max_batch": 4, "max_cores": 4}
    stage = {"name": "only", "model": str(model), "profile": profile}
    system = {"name": "static", "replicas": 1, "cores": cores}
    return {"name": "adds", "slo_ms": 5000, "stages": [stage], "system": system}


def serving(thread: LoopThread, folder: Path, model: Path) -> Running:
    return Running(thread, folder, application(model))


def answer_of(running: Running, version: str = "") -> tuple[str, float]:
    """The version that answers, and what it adds to 0."""
    path = f"/v2/models/adds{f'/versions/{version}' if version else ''}/infer"
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [0.0] * 4}
    status, text = running.ask("POST", path, {"inputs": [tensor]})
    assert status == 200, text
    answer = json.loads(text)
    return answer["model_version"], answer["outputs"][0]["data"][0]


def restarted(running: Running) -> None:
    """The worker is killed; another one is ready when this returns."""
    backend = running.server.backend
    assert isinstance(backend, LiveNode)

    async def pids() -> set[int | None]:
        return {backend.pid(replica) for replica in backend.workers}

    (before,) = running.thread.call(pids())
    assert before is not None
    os.kill(before, signal.SIGKILL)
    while running.thread.call(pids()) in (set(), {before}):
        time.sleep(0.01)
    running.wait_until_ready()


def resized(running: Running, cores: float) -> None:
    """The worker has opened a session for another number of threads, on which batches run."""
    backend = running.server.backend
    assert isinstance(backend, LiveNode)

    async def order() -> None:
        (replica,) = backend.workers
        backend.order(ResizeWorker(replica, cores))

    running.thread.call(order())
    time.sleep(0.5)  # the session is opened in the background


ONNX_CHANGES: dict[str, Change] = {
    "cp": _replaced_by_cp,
    "mv": _replaced_by_mv,
    "cp over the weights": lambda model: model.with_name("m.data").write_bytes(np.full(8, 9, np.float32).tobytes()),
    "another shape": lambda model: adding(model, 3, width=5),
    "half a file": lambda model: os.truncate(model, 40),
    "deleted": lambda model: shutil.rmtree(model.parent),
}
PYTHON_CHANGES: dict[str, Change] = {
    "cp": lambda model: model.write_text(model.read_text().replace("return x", "return 9 + x")),
    "cp over the module beside it": lambda model: next(model.parent.glob("helper_*.py")).write_text("ADD = 9"),
    "half a file": lambda model: os.truncate(model, 40),
    "deleted": lambda model: model.unlink(),
}


@pytest.mark.live
@pytest.mark.parametrize("change", ONNX_CHANGES)
def test_a_version_answers_what_was_examined(thread: LoopThread, tmp_path: Path, change: str) -> None:
    model = adding(tmp_path / "user" / "m.onnx", 1, data=("m.data",))
    with serving(thread, tmp_path / "state", model) as running:
        assert answer_of(running) == ("1", 1)
        ONNX_CHANGES[change](model)
        assert answer_of(running) == ("1", 1)
        resized(running, 2)
        assert answer_of(running) == ("1", 1)
        restarted(running)
        assert answer_of(running) == ("1", 1)


@pytest.mark.live
@pytest.mark.parametrize("change", PYTHON_CHANGES)
def test_a_python_version_answers_what_was_examined(thread: LoopThread, tmp_path: Path, change: str) -> None:
    name = f"live{list(PYTHON_CHANGES).index(change)}"
    model = python_model(tmp_path / "user", name)
    with serving(thread, tmp_path / "state", model) as running:
        assert answer_of(running) == ("1", 111)
        PYTHON_CHANGES[change](model)
        resized(running, 2)
        assert answer_of(running) == ("1", 111)
        restarted(running)
        assert answer_of(running) == ("1", 111)


@pytest.mark.live
def test_deploying_takes_the_change_and_the_version_before_keeps_its_own(thread: LoopThread, tmp_path: Path) -> None:
    model = adding(tmp_path / "m.onnx", 1)
    file = tmp_path / "adds.yaml"
    file.write_text(yaml.safe_dump(application(model)))
    with serving(thread, tmp_path / "state", model) as running:
        adding(model, 2)
        send(find_server(running.folder), Deploy(str(file), canary=Canary(0.5, promote_after_s=0)), lambda _: None)
        assert answer_of(running, "1") == ("1", 1)
        assert answer_of(running, "2") == ("2", 2)
        entries = list((tmp_path / "state" / COPIES).iterdir())
        assert len(entries) == 2
        send(find_server(running.folder), Removed("adds", "1"), lambda _: None)
        for _ in range(1000):
            if len(entries := list((tmp_path / "state" / COPIES).iterdir())) == 1:
                break
            time.sleep(0.02)
        assert len(entries) == 1, "the copy of the version that has ended is deleted"
        assert answer_of(running) == ("2", 2)


@pytest.mark.live
def test_a_server_says_that_a_file_has_changed_since_an_earlier_run(
    thread: LoopThread, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tmp_path / "m.onnx"
    for value, is_new in ((1, False), (1, False), (2, True), (2, False)):
        adding(model, value)
        caplog.clear()
        with serving(thread, tmp_path / "state", model) as running:
            assert ("m.onnx has changed since an earlier run of this server" in caplog.text) == is_new
            assert answer_of(running) == ("1", value)
            for _ in range(500):
                if len(list((tmp_path / "state" / COPIES).iterdir())) == 1:
                    break
                time.sleep(0.02)


@pytest.mark.live
def test_without_room_a_changed_file_starts_no_worker(
    thread: LoopThread, tmp_path: Path, full: None, caplog: pytest.LogCaptureFixture
) -> None:
    model = adding(tmp_path / "m.onnx", 1, data=("m.data",))
    with serving(thread, tmp_path / "state", model) as running:
        assert "no room for a copy of it" in caplog.text
        (tmp_path / "m.data").write_bytes(bytes(32))
        assert answer_of(running) == ("1", 1)
        resized(running, 2)
        assert answer_of(running) == ("1", 1)
