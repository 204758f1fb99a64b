"""Pictures with known text: labels as on a shelf or a parcel, some lines of which stand on their heads.

Promises that equal seeds draw equal pictures, and that every line keeps to what a strip can hold. Words are common
English ones, prices and codes; the font is the one inside Pillow.

    python examples/ocr/pictures.py label.npy --lines 4    # a picture for `sloop load --input`; .png to look at it
"""

import argparse
import sys
from dataclasses import dataclass
from random import Random
from typing import Final

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from strips import Array, Box, cut, stacked

SIZE: Final = (384, 288)
MARGIN: Final = 12
LINES_MAX: Final = 6
WORDS: Final = """
apple bread butter candle carton cheese coffee copper cotton delivery express fabric flour fresh garden ginger glass
green handle honey kitchen ladder lemon market melon metal mixed mustard number olive onion orange organic paper parcel
pepper plastic potato premium pumpkin return ribbon salad second silver simple spring station summer sugar table ticket
tomato total travel vanilla velvet walnut warehouse water weight wheat window winter wooden yellow
""".split()  # noqa: SIM905

Colour = tuple[int, int, int]


@dataclass(frozen=True)
class Picture:
    """Pixels (288, 384, 3), the lines from top to bottom, and where they are: left, top, right, bottom."""

    pixels: Array
    lines: tuple[str, ...]
    places: tuple[Box, ...]


def draw(seed: int, lines: int | None = None) -> Picture:
    """A picture of 1 to 6 lines, or of as many as told; 0 draws an empty label."""
    chance = Random(seed)
    count = chance.randint(1, LINES_MAX) if lines is None else lines
    paper, ink = _colours(chance)
    grain = np.random.default_rng(seed).normal(0, 4, (SIZE[1], SIZE[0], 1))
    slope = np.linspace(-10, 10, SIZE[0])[None, :, None] * chance.uniform(-1, 1)
    ground = np.clip(np.array(paper) + grain + slope, 0, 255).astype(np.uint8)
    page = Image.fromarray(ground)
    room = (SIZE[1] - 2 * MARGIN) // max(count, 4)
    texts = tuple(_text(chance) for _ in range(count))
    places = tuple(_write(page, text, MARGIN + at * room, room, ink, chance) for at, text in enumerate(texts))
    return Picture(np.asarray(page), texts, places)


def strips(rows: int) -> tuple[Array, Array]:
    """So many lines, cut out where they were drawn: (rows, 48, 320, 3), and their widths."""
    found: list[tuple[Array, int]] = []
    for seed in range(rows):
        picture = draw(seed, lines=4)
        for left, top, right, bottom in picture.places:
            edge = (bottom - top) // 6
            found.append(cut(picture.pixels, (left - edge, top - edge, right + edge, bottom + edge)))
        if len(found) >= rows:
            break
    return stacked(found[:rows])


def _colours(chance: Random) -> tuple[Colour, Colour]:
    light, dark = ((chance.randint(a, b), chance.randint(a, b), chance.randint(a, b)) for a, b in ((200, 250), (0, 70)))
    return (light, dark) if chance.random() < 0.8 else (dark, light)


def _text(chance: Random) -> str:
    word = chance.choice(WORDS)
    kind = chance.randrange(4)
    if kind == 0:
        return f"{word} {chance.randint(1, 99)}.{chance.randint(10, 99)}"
    if kind == 1:
        return f"{word} {chance.choice(WORDS)}"
    if kind == 2:
        return f"{word.upper()} {chance.randint(100, 9999)}"
    return f"{word.capitalize()} {chance.choice(('kg', 'box', 'set', 'new', 'sale'))} {chance.randint(2, 40)}"


def _write(page: Image.Image, text: str, top: int, room: int, ink: Colour, chance: Random) -> Box:
    """Write a line somewhere in the `room` pixels below `top`, three of ten on their heads; where it came to lie."""
    size = chance.randint(round(room * 0.5), round(room * 0.66))
    font = ImageFont.load_default(size)
    left, upper, right, lower = font.getbbox(text)
    while right - left > SIZE[0] - 2 * MARGIN:
        size -= 1
        font = ImageFont.load_default(size)
        left, upper, right, lower = font.getbbox(text)
    box = Image.new("L", (round(right - left), round(lower - upper)))
    ImageDraw.Draw(box).text((-left, -upper), text, fill=255, font=font)
    if chance.random() < 0.3:
        box = box.transpose(Image.Transpose.ROTATE_180)
    at = (chance.randint(MARGIN, SIZE[0] - MARGIN - box.width), top + (room - box.height) // 2)
    page.paste(ink, at, box)
    return (*at, at[0] + box.width, at[1] + box.height)


def character_errors(said: str, meant: str) -> int:
    """The least number of characters to put in, take out or replace."""
    row = list(range(len(said) + 1))
    for above, wanted in enumerate(meant, 1):
        corner, row[0] = row[0], above
        for place, given in enumerate(said, 1):
            corner, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, corner + (given != wanted))
    return row[-1]


def words_right(said: str, meant: str) -> tuple[int, int]:
    """How many of the words meant stand in the text in this order, and how many there are."""
    given, wanted = said.split(), meant.split()
    row = [0] * (len(given) + 1)
    for word in wanted:
        last = row[:]
        for place, other in enumerate(given, 1):
            row[place] = last[place - 1] + 1 if other == word else max(last[place], row[place - 1])
    return row[-1], len(wanted)


def main() -> None:
    """Draw a picture into a file."""
    parser = argparse.ArgumentParser(description="Draw a picture with text.")
    parser.add_argument("file", help=".npy for a tensor (1, 288, 384, 3), else a picture's ending")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lines", type=int)
    given = parser.parse_args()
    picture = draw(given.seed, given.lines)
    if given.file.endswith(".npy"):
        np.save(given.file, picture.pixels[None])
    else:
        Image.fromarray(picture.pixels).save(given.file)
    sys.stdout.write("\n".join((*picture.lines, "")))


if __name__ == "__main__":
    main()
