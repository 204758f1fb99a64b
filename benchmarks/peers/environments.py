"""The peers' virtual environments under `.peers/`, created when needed.

An existing environment has exactly the packages of its table: the list is written into it after all are installed, and
a different list leads to a new installation.
"""

import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.notebook import ROOT, say
from benchmarks.peers.peer import Environment, PeerFailed

FOLDER: Final = ROOT / ".peers"
INSTALL_S_MAX: Final = 900.0
LIST: Final = "installed.txt"


def python_of(environment: Environment) -> Path:
    """The environment's interpreter; installs packages if needed. PeerFailed, with pip's last line, if that fails."""
    if not environment.packages:
        return Path(sys.executable)
    folder = FOLDER / environment.name
    python = folder / "bin" / "python"
    wanted = "\n".join(environment.packages) + "\n"
    installed = folder / LIST
    if installed.is_file() and installed.read_text() == wanted:
        return python
    say(f"installing {', '.join(environment.packages)} into .peers/{environment.name}")
    if not python.exists():
        venv.create(folder, with_pip=True)
    _install(python, environment.packages)
    installed.write_text(wanted)
    return python


def _install(python: Path, packages: Sequence[str]) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S_MAX, check=False)
    except subprocess.TimeoutExpired:
        raise PeerFailed(f"not installed within {INSTALL_S_MAX:g} s") from None
    if done.returncode:
        raise PeerFailed(last_line(done.stderr) or f"pip ended with {done.returncode}")


def last_line(text: str) -> str:
    """The last line that is not empty, shortened for a table."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""
