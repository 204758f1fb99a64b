"""A drawing of a fabric of switches with the layers of a network on it, as SVG."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from sloop.api import number
from sloop.api.reports import PALETTE, SMALL, element, line_element, svg_element, text_at, write_drawing
from sloop_systems.netnn.mapper import Fabric, LayerPlacement

LEAVES_MAX: Final = 24
"""More switches cannot be told apart on a page; those without a layer are left out."""


def draw_fabric(fabric: Fabric, placements: Sequence[LayerPlacement], title: str, path: Path) -> None:
    """Leaves below, upper switches above, a link from each leaf to each of them; a leaf shows its pipelines, those that
    compute filled. InputError for a suffix other than .svg, MachineError if it cannot be written."""
    used = max(placement.leaves[-1] for placement in placements) + 1
    leaves = min(fabric.leaves, max(used, min(LEAVES_MAX, fabric.leaves)))
    slot, top, upper_y = 108.0, 150.0, 40.0
    left = max(0.0, (504.0 - slot * leaves) / 2)
    uppers = [left + (place + 0.5) * slot * leaves / fabric.pipelines for place in range(fabric.pipelines)]
    drawn = [text_at(0, 16, title, size=13, font_weight="bold")]
    for leaf in range(leaves):
        x = left + (leaf + 0.5) * slot
        drawn += [line_element(x, top, upper, upper_y + 26, 0.3, stroke_width="0.6") for upper in uppers]
    for place, upper in enumerate(uppers):
        drawn.append(_box(upper - 32, upper_y, 64, 26, PALETTE[7], f"spine {place + 1}"))
    owners = {leaf: placement for placement in placements for leaf in placement.leaves}
    colours = {placement.name: PALETTE[at % 7] for at, placement in enumerate(placements)}
    for leaf in range(leaves):
        owner = owners.get(leaf)
        drawn += _leaf(leaf, owner, fabric.pipelines, left + leaf * slot, top, slot, colours)
    alt = f"{title}: {len(placements)} layers on {used} of {fabric.leaves} leaves."
    write_drawing(svg_element(drawn, width=max(504.0, slot * leaves), height=top + 140, alt=alt), path)


def _leaf(
    leaf: int,
    placement: LayerPlacement | None,
    pipelines: int,
    x: float,
    y: float,
    slot: float,
    colours: Mapping[str, str],
) -> Iterator[str]:
    width = 0.9 * slot / pipelines
    for pipeline in range(pipelines):
        computes = placement is not None and (leaf, pipeline) in placement.units
        text = str(placement.neurons_per_unit) if placement is not None and computes else ""
        colour = colours[placement.name] if placement is not None and computes else ""
        yield _box(x + 0.05 * slot + pipeline * width, y, width * 0.92, 72, colour, text)
    middle = x + slot / 2
    name = "features" if leaf == 0 else placement.name if placement else ""
    yield text_at(middle, y + 90, f"leaf {leaf}\n{name}", size=SMALL, text_anchor="middle", font_weight="bold")
    if placement is not None:
        size = number(round(placement.memory_bytes / len(placement.leaves)))
        yield text_at(middle, y + 120, f"{size} B", size=10, text_anchor="middle")


def _box(x: float, y: float, width: float, height: float, colour: str, text: str) -> str:
    """Filled, or an outline where nothing is computed."""
    fill, opacity = (colour, "1") if colour else ("currentColor", "0.08")
    drawn = element(
        "rect",
        x=x,
        y=y,
        width=width,
        height=height,
        stroke="currentColor",
        stroke_opacity="0.4",
        fill=fill,
        fill_opacity=opacity,
    )
    return drawn + (text_at(x + width / 2, y + height / 2 + 4, text, size=10, text_anchor="middle") if text else "")
