"""Imports Python files that a user wrote: custom policies and systems, models as scripts.

Any exception in such a file becomes an `InputError` with file and line. The file's folder becomes the first entry of
the import path, as for `python FILE`. What a model raises while it serves becomes a `ModelFailure` (`failure_of`).

A file that has changed is executed again, also if only a module beside it has changed: a running server must not serve
a new version with old code. Python keeps imported modules, so those that files of users have imported from their own
folders are forgotten first. Code that was executed before keeps the modules that it has.

A file may have a private copy, with copies of the modules beside it (`sloop.serve.copies`). Then the copies are
executed, whatever happens to the user's files. Their `__file__` still names the user's files, so that code finds its
data beside it.
"""

import ast
import contextlib
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple, NoReturn

from msgspec import Struct

from sloop.errors import InputError, Refused

_FOLDERS: Final = {str(Path(__file__).resolve().parent), *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib"))}
LIBRARIES: Final = (*(f"{folder}{os.sep}" for folder in sorted(_FOLDERS)), "<")
"""Prefixes of the names of files that no user wrote; `<` is that of code without a file."""
FRAMES_MAX: Final = 40
MESSAGE_CHARS_MAX: Final = 300
TRACE_CHARS_MAX: Final = 8_000
"""Bounds of what is kept of an exception: one request must not fill the server's log."""
LEFT_OUT: Final = "  … frames that are left out here …\n"
REFUSED: Final = "refused"
"""The first line of an encoded `ModelFailure` that is a refusal."""

PLACE: Final = re.compile(
    r"(?:\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : )?"
    r"(?:/\S+\.(?:cc|h):\d+ "
    r"(?:(?:[\w:<>*&, ]+ )??[\w:<>~]+\([^)]*\)(?: const)?(?:::<lambda[^>]*>)?(?: \[with [^]]*\])? ?)?"
    r"|\b\w+\.(?:cc|h):\d+ (?:operator\(\)|\w+) )"
)
"""A place in ONNX Runtime's source, with the function: its whole signature, or its name alone."""
PREFIX: Final = re.compile(r"^(?:\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : )?(?:Load model from .+? failed: ?)?")
NODE: Final = re.compile(
    r"Non-zero status code returned while running (?P<op>\w+) node\. ?Name: ?'(?P<name>[^']*)' ?Status Message: "
)

PYTHON: Final = ".py"
SOURCES: Final = "sources.json"
"""The file beside the folder of private copies of a model that says where each was made from: `paths` by name, the
first that of the Python file itself."""
MODULES_MAX: Final = 1000
"""The most modules beside a file that are followed."""

_executed: Final[dict[tuple[Path, bytes, tuple[bytes, ...]], ModuleType]] = {}
"""By path, content, and the contents of the files beside it."""
_beside: Final[dict[tuple[Path, bytes], tuple[Path, ...]]] = {}
"""By path and content, the files of the modules beside it that were imported."""
_imported: Final[dict[str, tuple[Path, bytes]]] = {}
"""The modules that files of users have imported from their folders: of each, by name, file and content."""


def module_in(path: Path) -> ModuleType:
    """The module in a file. The first call executes the file; later ones do so again if it or a module beside it has
    changed. InputError if that fails."""
    try:
        source = path.read_bytes()
    except OSError as error:
        raise InputError("there is no such file", where=str(path), help="give the path of a Python file") from error
    if kept := _sources(path):
        if (path, b"", ()) not in _executed:
            _find_copies(path.parent, kept)
            own = kept[path.name]
            _executed[path, b"", ()] = _execute(own, source, folders_of(own))
        return _executed[path, b"", ()]
    place = path.absolute()  # a log or a definition may name the same file otherwise
    contents = _contents(_beside.get((place, source), ()))
    found = _executed.get((place, source, contents))
    if found is None:
        folder = path.resolve().parent
        _forget_changed(folder)
        found = _execute(path, source, folders_of(path))
        files = tuple(sorted({file for file, _ in _imported.values() if folder in file.parents}))
        _beside[place, source] = files
        _executed[place, source, _contents(files)] = found
    return found


def _contents(files: Iterable[Path]) -> tuple[bytes, ...]:
    """A digest of each file; empty for one that is not there."""
    found = []
    for file in files:
        try:
            found.append(hashlib.sha256(file.read_bytes()).digest())
        except OSError:
            found.append(b"")
    return tuple(found)


def _forget_changed(folder: Path) -> None:
    """Let Python import again what users' files have imported from a folder, if any of it has changed: modules may have
    taken names from each other."""
    own = {name: known for name, known in _imported.items() if folder in known[0].parents}
    if _contents(file for file, _ in own.values()) != tuple(content for _, content in own.values()):
        for name, (file, _) in own.items():
            sys.modules.pop(name, None)
            del _imported[name]
            with contextlib.suppress(OSError):  # Python would use it if size and second of change are the same
                os.unlink(importlib.util.cache_from_source(str(file)))


def _note_imports(folder: Path, before: frozenset[str]) -> None:
    """Remember which modules were imported from a folder, except those that were imported `before`."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name not in before and file and not file.startswith(LIBRARIES) and folder in Path(file).resolve().parents:
            _imported[name] = Path(file).resolve(), _contents([Path(file)])[0]


def _execute(path: Path, source: bytes, folders: Sequence[Path]) -> ModuleType:
    # The stem alone could shadow a library; the digest keeps classes of an earlier content apart from these. It is the
    # same in every process, because snapshots name classes.
    name = f"sloop_user_{path.stem}_{hashlib.sha256(source).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path.absolute())
    assert spec is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module there
    for folder in reversed(folders):
        if sys.path[0] != str(folder):
            sys.path.insert(0, str(folder))
    before = frozenset(sys.modules)
    importlib.invalidate_caches()
    try:
        # Not by the loader: it takes a cached .pyc for this source if size and second of change are the same.
        with contextlib.redirect_stdout(sys.stderr):  # stdout belongs to the command, which may print JSON there
            exec(compile(source, str(path.absolute()), "exec"), module.__dict__)
    except raised_by_users() as error:
        raise_user_error(error, path, "it cannot be imported")
    finally:
        for folder in folders:
            _note_imports(folder, before)
    return module


# Private copies


def folders_of(path: Path) -> tuple[Path, ...]:
    """Where the modules beside a Python file are looked for: in the folder that its name says and, if the file is a
    link, in that of the file itself."""
    return tuple(dict.fromkeys((path.absolute().parent, path.resolve().parent)))


def user_path(path: Path) -> Path:
    """The file of the user that a private copy was made from; the path itself for any other file."""
    return _sources(path).get(path.name, path)


def _sources(path: Path) -> dict[str, Path]:
    """If this is a private copy of a Python file, the user's files by the names of their copies; otherwise empty."""
    if path.suffix != PYTHON:
        return {}
    try:
        known = json.loads((path.parent.parent / SOURCES).read_bytes())["paths"]
    except (OSError, ValueError, TypeError, KeyError):  # there is none, or it is another program's
        return {}
    return {name: Path(file) for name, file in known.items()}


def modules_beside(path: Path) -> dict[str, Path]:
    """The modules beside a Python file that it imports, directly or through other modules beside it, by their paths
    relative to its folder. Imports are found in the source, also within functions; nothing is executed."""
    folders = folders_of(path)
    found: dict[str, Path] = {}
    unread: list[tuple[Path, str]] = [(path, "")]
    while unread and len(found) < MODULES_MAX:
        file, package = unread.pop()
        try:
            names = dict.fromkeys(_imported_names(ast.parse(file.read_bytes()), package))
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue  # whoever executes it will say so
        for name in names:
            for place in (f"{name.replace('.', '/')}/__init__.py", f"{name.replace('.', '/')}.py"):
                there = next((folder / place for folder in folders if (folder / place).is_file()), None)
                if there is not None and place not in found and not there.samefile(path):
                    found[place] = there
                    unread.append((there, name if place.endswith("/__init__.py") else name.rpartition(".")[0]))
    return dict(sorted(found.items()))


def _imported_names(tree: ast.Module, package: str) -> Iterator[str]:
    """The dotted names of all modules that source code in this package may import, and of the packages around them."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".") if package else []
            above = parents[: len(parents) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = [base, *(f"{base}.{alias.name}" if base else alias.name for alias in node.names)]
        for name in filter(None, names):
            parts = name.split(".")
            yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))


class _CopyFinder(importlib.abc.MetaPathFinder):
    """Finds modules of users in their private copies."""

    def __init__(self, copies: Mapping[str, tuple[Path, Path]]) -> None:
        """`copies` has, by dotted name, the copy and the file of the user."""
        self.copies = copies
        self._folders: dict[str, str] = {}
        for name, (_, original) in copies.items():
            folder = original.parent if original.name != "__init__.py" else original.parent.parent
            while name := name.rpartition(".")[0]:  # outwards
                self._folders[name], folder = str(folder), folder.parent

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in self.copies:
            loader = _CopyLoader(fullname, *self.copies[fullname])
            return importlib.util.spec_from_file_location(fullname, loader.path, loader=loader)
        if fullname in self._folders:  # a package without a file of its own, which may be gone
            spec = importlib.machinery.ModuleSpec(fullname, None, is_package=True)
            spec.submodule_search_locations = [self._folders[fullname]]
            return spec
        return None


class _CopyLoader(importlib.machinery.SourceFileLoader):
    """Loads a module from its private copy, under the path of the user's file."""

    def __init__(self, name: str, copy: Path, original: Path) -> None:
        super().__init__(name, str(original))
        self._copy = copy

    def get_data(self, path: str) -> bytes:
        return self._copy.read_bytes() if path == self.path else super().get_data(path)

    def path_stats(self, path: str) -> Mapping[str, Any]:
        raise OSError("a cached .pyc is of the user's file")


def _find_copies(folder: Path, kept: Mapping[str, Path]) -> None:
    """Let Python find the modules beside a file in their copies in a folder, instead of those of an earlier version."""
    copies = {
        place.removesuffix(".py").removesuffix("/__init__").replace("/", "."): (folder / place, original)
        for place, original in list(kept.items())[1:]
    }
    for name, (_, original) in copies.items():
        if getattr(sys.modules.get(name), "__file__", None) == str(original):
            del sys.modules[name]
    sys.meta_path[:] = [each for each in sys.meta_path if not (isinstance(each, _CopyFinder) and copies)]
    if copies:  # beside the finder of files: built-in modules have their names before it
        sys.meta_path.insert(sys.meta_path.index(importlib.machinery.PathFinder), _CopyFinder(copies))


# What users' code raises


def raised_by_users() -> tuple[type[BaseException], ...]:
    """What `except` is to name around users' code: everything but Ctrl-C. A panic of a library in Rust is no
    `Exception`, nor is the cancellation of a coroutine."""
    return tuple(kind for kind in BaseException.__subclasses__() if kind is not KeyboardInterrupt)


def raise_user_error(error: BaseException, path: Path, what: str) -> NoReturn:
    """Raise an `InputError` for an exception of the user's code. It names the file's last line in the traceback."""
    raise InputError(f"{what}: {said_by(error)}", where=line_in(path, error), help="correct the file") from error


def line_in(path: Path, error: BaseException) -> str:
    """`FILE:LINE` of the last line of this file in an exception's traceback; `FILE` if there is none."""
    path = user_path(path)
    own = str(path.absolute())
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == own]
    line = frames[-1].lineno if frames else None
    if isinstance(error, SyntaxError) and error.filename == own:
        line = error.lineno
    return f"{path}:{line}" if line else str(path)


class WrongOutputsError(ValueError):
    """A model returned other outputs than it declares. `is_certain`: it would do so for every input; otherwise, perhaps
    only for inputs of these sizes."""

    def __init__(self, what: str, *, is_certain: bool = True) -> None:
        super().__init__(what)
        self.is_certain = is_certain


class ModelFailure(Struct, frozen=True):
    """Why a model failed on a batch: what its clients are told, and what only the server's log shows."""

    summary: str
    """For clients, who must not learn what is inside the model: `the model raised ValueError`. Of a refusal, its
    text."""
    detail: str = ""
    """One line: `ValueError: index 7 is out of range (stage.py:12)`."""
    trace: str = ""
    """The traceback from the user's first line on."""
    is_refusal: bool = False
    """Whether what the client sent is to blame (`sloop.errors.Refused`), not the model."""

    def encode(self) -> bytes:
        """As bytes, for `decode`."""
        kind = REFUSED if self.is_refusal else ""
        return "\n".join((kind, self.summary, self.detail, self.trace)).encode("utf-8", "backslashreplace")

    @classmethod
    def decode(cls, data: bytes | memoryview) -> "ModelFailure":
        """The failure that was encoded."""
        kind, _, rest = str(data, "utf-8", "replace").partition("\n")
        summary, _, rest = rest.partition("\n")
        detail, _, trace = rest.partition("\n")
        return cls(summary, detail, trace, kind == REFUSED)


def failure_of(error: BaseException) -> ModelFailure:
    """What to say about an exception that a model raised, in bounded texts."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [at for at, frame in enumerate(frames) if not frame.filename.startswith(LIBRARIES)]
    place = ""
    if own:
        last = frames[own[-1]]
        place = f" ({Path(last.filename).name}:{last.lineno})"
    if isinstance(error, Refused):
        text = _one_line(error)
        return ModelFailure(text or "the model refuses these inputs", f"refused: {text}{place}", is_refusal=True)
    detail = said_by(error)
    if isinstance(error, WrongOutputsError):
        return ModelFailure("the model's outputs are not those that it declares", detail)
    users = frames[own[0] :] if own else frames
    trace = f"Traceback (most recent call last):\n{''.join(_whole_frames(users))}{detail}"
    return ModelFailure(f"the model raised {type(error).__name__}", detail + place, trace)


def _whole_frames(frames: Sequence[traceback.FrameSummary]) -> list[str]:
    """These frames as a traceback shows them. Beyond `FRAMES_MAX` or `TRACE_CHARS_MAX` whole ones are left out, after
    the first: that and the last ones say where it came from and where it was."""
    first, *others = traceback.StackSummary.from_list([*frames[:1], *frames[1:][-FRAMES_MAX:]]).format() or [""]
    left_chars, kept = TRACE_CHARS_MAX - len(first) - 100, len(others)  # and the lines around them
    for at in reversed(range(len(others))):
        left_chars -= len(others[at])
        if left_chars < 0:
            kept = len(others) - 1 - at
            break
    is_whole = kept == len(others) and len(frames) <= FRAMES_MAX + 1
    return [first, *([] if is_whole else [LEFT_OUT]), *others[len(others) - kept :]]


def said_by(error: BaseException) -> str:
    """`TYPE: TEXT` of an exception in one line of bounded length; the text alone if sloop itself found the fault."""
    kind, text = type(error).__name__, _one_line(error)
    return text if isinstance(error, WrongOutputsError) else f"{kind}: {text}" if text else kind


def _one_line(error: BaseException) -> str:
    """The text of an exception in one line of bounded length."""
    try:
        text = str(error)
    except Exception:  # the author's code
        text = "its text cannot be made"
    text = " ".join(text[: 4 * MESSAGE_CHARS_MAX].split())
    if is_of_onnx_runtime(error):
        text = runtime_reason(text, len(text))
    return f"{text[:MESSAGE_CHARS_MAX]}…" if len(text) > MESSAGE_CHARS_MAX else text


# What ONNX Runtime says


def is_of_onnx_runtime(error: BaseException) -> bool:
    """Whether ONNX Runtime has raised it."""
    return type(error).__module__.split(".")[0] == "onnxruntime"


class NodeFailure(NamedTuple):
    """A message of ONNX Runtime: operator and name of the node that failed, the innermost if it is inside others, both
    empty if it names none, and what it says."""

    op: str
    name: str
    said: str

    @classmethod
    def of(cls, message: str) -> "NodeFailure":
        """Without the places in ONNX Runtime's own source."""
        message = PLACE.sub("", PREFIX.sub("", message))
        *_, node = (None, *NODE.finditer(message))
        return cls("", "", message) if node is None else cls(node["op"], node["name"], message[node.end() :])


def runtime_reason(error: Exception | str, chars_max: int = 160) -> str:
    """What ONNX Runtime says of an error, in one line."""
    failure = NodeFailure.of((str(error).strip().splitlines() or [type(error).__name__])[0])
    node = f"{failure.op} {failure.name!r}: " if failure.name else f"{failure.op}: " if failure.op else ""
    return f"{node}{failure.said}"[:chars_max]
