"""Writes results: each benchmark has one page in `benchmarks/results/`, with its command, date and machine.

Running a benchmark again replaces its page, except for the text after the line `<!-- notes -->`.
"""

import argparse
import contextlib
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from sloop import units
from sloop.machine import hardware_name
from sloop.report.plots import Figure
from sloop.report.svg import svg, svg_file
from sloop.serve.processes import SPARE

ROOT: Final = Path(__file__).resolve().parents[1]
RESULTS: Final = ROOT / "benchmarks" / "results"
NOTES: Final = "<!-- notes -->"


def arguments(about: str | None, *, seconds: float | None = None, quick: float = 0.0) -> argparse.ArgumentParser:
    """A parser that knows `--seed`, `--no-write`, `--keep` and, with a default for it, `--seconds` and `--quick`."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if seconds is not None:
        parser.add_argument(
            "--seconds", type=float, default=seconds, help=f"duration of each run (default {seconds:g})"
        )
        parser.add_argument(
            "--quick", action="store_const", dest="seconds", const=quick, help=f"the same as --seconds {quick:g}"
        )
    parser.add_argument("--seed", type=int, default=1, help="seed of all random numbers (default 1)")
    parser.add_argument("--no-write", action="store_true", help="do not write to benchmarks/results")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep models, logs and records in FOLDER")
    return parser


@contextmanager
def workspace(keep: Path | None) -> Iterator[Path]:
    """A folder for models, logs and records: the one to keep, or one that is removed afterwards."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="sloop-bench-") as name:
        yield Path(name)


def say(text: str) -> None:
    """Print one line of progress on stderr, with the time."""
    sys.stderr.write(f"[{datetime.now(UTC):%H:%M:%S}] {text}\n")
    sys.stderr.flush()


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; numbers to four digits."""
    lines = [columns, ["---"] * len(columns), *([cell(value) for value in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def cell(value: object) -> str:
    """A value as text in a table."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def quantile(values: Sequence[float], share: float) -> float | None:
    """The nearest-rank quantile; None of nothing."""
    if not values:
        return None
    return units.quantile(sorted(values), share)


def command_line() -> str:
    """The command line that starts this program again, from the project's root."""
    program = Path(sys.argv[0])
    name = program.parent.name if program.stem == "__main__" else program.stem
    return shlex.join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]])


def publish(name: str, title: str, text: str, figures: Sequence[Figure] = (), *, write: bool = True) -> None:
    """Print a measurement, and write it with its figures to `benchmarks/results/NAME.md`."""
    now = datetime.now(UTC)
    load = os.getloadavg()[0]
    made = f"`{command_line()}`, {now:%Y-%m-%d %H:%M} UTC, {hardware_name()}; load average at the end {load:.1f}."
    images = [f"![{figure.alt}]({name}-{figure.name}.svg)" for figure in figures]
    page = "\n\n".join([f"# {title}", made, text.strip(), *images]) + "\n"
    sys.stdout.write(page)
    if not write:
        return
    RESULTS.mkdir(exist_ok=True)
    for figure in figures:
        (RESULTS / f"{name}-{figure.name}.svg").write_text(svg_file(svg(figure)))
    path = RESULTS / f"{name}.md"
    _, found, notes = path.read_text().partition(NOTES) if path.exists() else ("", "", "")
    path.write_text(page + (f"\n{NOTES}{notes}" if found else ""))


def children(pid: int) -> Iterator[tuple[int, str]]:
    """The running child processes of `pid`, with their command lines."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid:
                yield int(folder.name), (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()


def server_pid() -> int:
    """The `sloop serve` that this process has started."""
    return next(pid for pid, command in children(os.getpid()) if " serve " in command)


def worker_pids() -> list[int]:
    """The processes of that server that serve replicas."""
    workers = [pid for pid, command in children(server_pid()) if "sloop.serve.worker" in command]
    return [pid for pid in workers if Path(f"/proc/{pid}/comm").read_text().strip() != SPARE]
