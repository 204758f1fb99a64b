"""A trace drawn: requests per second over its length. Knows arrivals, no run."""

from pathlib import Path

from sloop.errors import InputError, MachineError
from sloop.report.figures import Figure, Panel, Series, thin
from sloop.report.plots import png, svg
from sloop.workload import Trace


def figure_of(trace: Trace) -> Figure:
    """Requests per second; a long trace is thinned by the largest second of each stretch."""
    counts = trace.counts_per_s()
    x, y = thin([float(second) for second in range(len(counts))], [float(count) for count in counts])
    panel = Panel(y_label="requests/s", series=(Series("arrivals", tuple(x), tuple(y), "steps"),))
    alt = f"Requests per second of {trace.name}, at most {max(counts, default=0)}."
    return Figure(name="arrivals", title=str(trace), x_label="time, s", panels=(panel,), alt=alt)


def draw(figure: Figure, path: Path) -> None:
    """Write a figure as .png or .svg. InputError for another ending, MachineError where it cannot be written."""
    if path.suffix == ".png":
        content = png(figure)
    elif path.suffix == ".svg":
        content = svg(figure).encode()
    else:
        raise InputError(f"{path.name!r} is neither .png nor .svg", help="end its name with one of these")
    try:
        path.write_bytes(content)
    except OSError as error:
        help_text = "name a file in a folder that may be written"
        raise MachineError(f"{path} cannot be written: {error.strerror}", help=help_text) from error
