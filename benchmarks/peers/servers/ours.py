"""sloop as its users start it: a profile of the model, an application file, `sloop serve`. No limit is set by hand."""

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.notebook import say
from benchmarks.peers.bodies import oip
from benchmarks.peers.environments import last_line
from benchmarks.peers.peer import Ask, Case, Encoding, Environment, Launch, Limits, PeerFailed, Tuning
from sloop.profile.profile import path_beside

PROFILE_S_MAX: Final = 300.0
ENVIRONMENT: Final = Environment("sloop", ())


@dataclass(frozen=True, slots=True)
class Sloop:
    """With one of its systems."""

    name: str = "sloop"
    system: str = "early-drop"
    """As an application file names it."""
    environment: Environment = ENVIRONMENT
    encodings: frozenset[Encoding] = frozenset(Encoding)

    @property
    def how(self) -> str:
        return (
            f"`sloop profile`, `system: {self.system}`, else its defaults (batches as its profile finds); "
            "deadlines, decisions and event log on; binary: the protocol's extension"
        )

    @property
    def tunings(self) -> Mapping[str, Tuning]:
        return {"none set by hand": {}}

    def launch(self, case: Case, python: Path, port: int) -> Launch:
        profiled(case, python)
        app = case.folder / "app.yaml"
        model = case.model.path.absolute()
        app.write_text(
            f"name: model\nslo_ms: {case.slo_ms:g}\nstages: [{{name: model, model: {model}}}]\nsystem: {self.system}\n"
        )
        flags = ("--http-port", str(port), "--grpc-port", "0", "--state", str(case.folder.absolute() / "state"))
        return Launch((str(python), "-m", "sloop", "serve", str(app.absolute()), *flags), {}, port, "/v2/health/ready")

    def ask(self, case: Case, row: bytes) -> Ask:
        return oip(case, row, "model")

    def limits(self, queue: int, slo_ms: float) -> Mapping[str, Limits]:
        return {"none set by hand": {}}


def profiled(case: Case, python: Path) -> None:
    """Measure the model, once; which batches are worth it, it finds out itself."""
    if path_beside(case.model.path).exists():
        return
    say(f"sloop profile {case.model.path.name}")
    command = [str(python), "-m", "sloop", "profile", str(case.model.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROFILE_S_MAX, check=False)
    if done.returncode:
        raise PeerFailed(last_line(done.stderr))


SLOOP: Final = Sloop()
SLOOP_STATIC: Final = Sloop("sloop, static", "static")
"""The baseline of every paper: it lets everybody in."""
