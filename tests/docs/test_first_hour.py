"""README and tutorial as a newcomer types them: the requests shown get the answers shown, from the files shown."""

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec import structs

from sloop.demo import write_example
from sloop.profile.profile import Quadratic, digest_of_model, path_beside, save_profile
from sloop.profile.published import RESNET_T
from tests.docs.test_docs import BLOCK, ROOT

README, TUTORIAL = ROOT / "README.md", ROOT / "docs" / "tutorial.md"
SHOWN = "http://localhost:8000"
FILE = re.compile(r"# (\S+\.(?:py|yaml))\n")
QUICK = structs.replace(RESNET_T, latency_ms=Quadratic(alpha=0.0, beta=1.0, gamma=1.0))


def write_files(folder: Path) -> None:
    """What `sloop demo --files` writes, and the files that the tutorial shows, with profiles, so that nothing is
    measured."""
    write_example(folder)
    for name, text in shown_files().items():
        (folder / name).write_text(text)
    for model in (folder / "digits.onnx", folder / "prepare.py", folder / "join.py"):
        save_profile(structs.replace(QUICK, model_digest=digest_of_model(model)), path_beside(model))


def shown_files() -> dict[str, str]:
    """The files that the tutorial shows, by name."""
    texts = [text for _, text in BLOCK.findall(TUTORIAL.read_text())]
    return {named[1]: text for text in texts if (named := FILE.match(text)) is not None}


@contextmanager
def serving(folder: Path, app: str) -> Iterator[str]:
    """A server as `sloop serve APP` starts it, on a free port, once it is ready: its address."""
    command = [sys.executable, "-m", "sloop", "serve", app, "--http-port", "0", "--grpc-port", "0", "--json"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            said = json.loads(process.stdout.readline())
            assert any("ready after" in line and "not ready" not in line for line in process.stderr)
            yield str(said["http"])
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)


def requests_to(model: str, document: Path) -> list[tuple[list[str], str]]:
    """The commands that a document shows with requests to a model, each with its answer, which is shown next."""
    blocks, files = BLOCK.findall(document.read_text()), shown_files()
    found = []
    for place, (kind, text) in enumerate(blocks):
        sent, command = text, ["sh", "-c", text]
        if kind == "sh" and text.startswith("python "):
            sent = files[text.split()[1]]
            command = [sys.executable, "-c", sent]
        elif kind == "python" and not FILE.match(text):
            command = [sys.executable, "-c", text]
        elif not text.startswith("curl "):
            continue
        if f"/v2/models/{model}" in sent:
            found.append((command, blocks[place + 1][1].strip()))
    return found


def answer_of(command: list[str], folder: Path) -> str:
    """What a command prints; it is repeated while a busy machine does not answer in time (504)."""
    for _ in range(50):
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
        if "504" not in result.stderr and '"error":"dropped' not in result.stdout + result.stderr:
            break
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.live
@pytest.mark.parametrize(
    ("document", "app", "model", "count"),
    [
        (README, "digits.onnx", "digits", 2),
        (TUTORIAL, "app.yaml", "digits", 2),
        (TUTORIAL, "numbers.yaml", "numbers", 2),
    ],
)
def test_requests_shown_get_the_answers_shown(document: Path, app: str, model: str, count: int, tmp_path: Path) -> None:
    write_files(tmp_path)
    found = requests_to(model, document)
    assert len(found) == count
    with serving(tmp_path, app) as url:
        for command, shown in found:
            if command[0] == "sh" and shutil.which("curl") is None:
                continue
            assert answer_of([*command[:2], command[2].replace(SHOWN, url)], tmp_path) == shown


REFUSING = """
import sloop

class Model:
    inputs = {"text": ("BYTES", (-1, 1)), "flag": ("BOOL", (-1, 2))}
    outputs = {"y": ("BOOL", (-1, 2))}

    def run(self, text, flag):
        raise sloop.Refused(f"{text.tolist()} and {flag.tolist()} say nothing")
"""


@pytest.mark.live
def test_the_request_of_zeros_takes_texts_and_flags_and_shows_what_the_server_says(tmp_path: Path) -> None:
    model = tmp_path / "words.py"
    model.write_text(REFUSING)
    save_profile(structs.replace(QUICK, model_digest=digest_of_model(model)), path_beside(model))
    with serving(tmp_path, model.name) as url:
        sent = shown_files()["zeros.py"].replace(f"{SHOWN}/v2/models/digits", f"{url}/v2/models/words")
        for _ in range(50):  # a busy machine may drop it
            result = subprocess.run(
                [sys.executable, "-c", sent], capture_output=True, text=True, timeout=60, check=False
            )
            if '"error":"dropped' not in result.stderr:
                break
    assert result.returncode == 1
    assert json.loads(result.stderr)["error"] == "[[b'']] and [[False, False]] say nothing"


def test_the_first_application_is_the_one_that_the_demo_writes(tmp_path: Path) -> None:
    write_example(tmp_path)
    shown = next(text for kind, text in BLOCK.findall(README.read_text()) if kind == "yaml")
    written = (tmp_path / "app.yaml").read_text()
    assert re.sub(r"\s*#.*", "", shown) == re.sub(r"\s*#.*", "", written)
