"""A picture of a fabric with the layers of a network on its switches."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sloop.errors import InputError, MachineError
from sloop.innet.mapper import Fabric, LayerPlacement
from sloop.report.plots import FAINT, INK, PALETTE
from sloop.text import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEAVES_MAX: Final = 24
"""More cannot be told apart on a page; those without a layer are left out."""


def draw_fabric(fabric: Fabric, placements: Sequence[LayerPlacement], title: str, path: Path) -> None:
    """Leaves below, upper switches above, a link from each leaf to each of them; a leaf shows its pipelines, those that
    compute filled. InputError for a suffix other than .png and .svg, MachineError if it cannot be written."""
    if path.suffix not in (".png", ".svg"):
        raise InputError(
            f"a picture cannot be a {path.suffix or 'file without suffix'}", where=str(path), help="use .svg"
        )
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  # it takes 0.3 s
    from matplotlib.figure import Figure  # noqa: PLC0415

    used = max(placement.leaves[-1] for placement in placements) + 1
    leaves = min(fabric.leaves, max(used, min(LEAVES_MAX, fabric.leaves)))
    canvas = Figure(figsize=(max(7.0, 1.5 * leaves), 4.2), layout="constrained")
    FigureCanvasAgg(canvas)
    axis = canvas.add_subplot()
    axis.set_axis_off()
    axis.set_title(title, fontsize=10, fontweight="bold", loc="left", color=INK)
    _draw_switches(axis, fabric, placements, leaves)
    try:
        canvas.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise MachineError(f"cannot write {str(path)!r}: {error.strerror}", help="give another path") from error


def _draw_switches(axis: "Axes", fabric: Fabric, placements: Sequence[LayerPlacement], leaves: int) -> None:
    uppers = fabric.pipelines
    at_upper = [(place + 0.5) * leaves / uppers for place in range(uppers)]
    for leaf in range(leaves):
        for upper in at_upper:
            axis.plot([leaf + 0.5, upper], [1.0, 2.0], color=FAINT, linewidth=0.4, zorder=0)
    for place, upper in enumerate(at_upper):
        _box(axis, upper - 0.3, 2.0, 0.6, 0.3, "0.5", f"spine {place + 1}")
    owners = {leaf: placement for placement in placements for leaf in placement.leaves}
    colours = {placement.name: PALETTE[at % (len(PALETTE) - 1)] for at, placement in enumerate(placements)}
    for leaf in range(leaves):
        placement = owners.get(leaf)
        title = "features" if leaf == 0 else placement.name if placement else ""
        axis.text(leaf + 0.5, -0.12, f"leaf {leaf}\n{title}", ha="center", va="top", fontsize=8, fontweight="bold")
        if placement is not None:
            size = number(round(placement.memory_bytes / len(placement.leaves)))
            axis.text(leaf + 0.5, -0.55, f"{size} B", ha="center", va="top", fontsize=7)
        for pipeline in range(fabric.pipelines):
            computes = placement is not None and (leaf, pipeline) in placement.units
            width = 0.9 / fabric.pipelines
            left = leaf + 0.05 + pipeline * width
            text = str(placement.neurons_per_unit) if placement is not None and computes else ""
            colour = colours[placement.name] if placement is not None and computes else "0.9" if leaf else "0.7"
            _box(axis, left, 0.0, width * 0.92, 1.0, colour, text)
    axis.set_xlim(-0.1, leaves + 0.1)
    axis.set_ylim(-0.85, 2.4)


def _box(axis: "Axes", left: float, bottom: float, width: float, height: float, colour: str, text: str) -> Any:  # noqa: ANN401
    axis.bar([left + width / 2], [height], width=width, bottom=bottom, color=colour, edgecolor=FAINT, linewidth=0.6)
    if text:
        axis.text(left + width / 2, bottom + height / 2, text, ha="center", va="center", fontsize=7)
