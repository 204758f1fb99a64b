"""Makes the example's models: `python -m examples.digits.make`.

Learns all six from one seed, writes them as ONNX beside the application file, measures them on held-out handwriting
and writes their accuracies into the application file. Profiles are `sloop profile`'s to measure, see the README.
"""

import re
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

from examples.digits import read, restore
from examples.digits.graph import write
from examples.digits.measured import READERS, TABLE, Measured, measure, path_of
from examples.digits.pictures import learned

APPLICATION: Final = Path(__file__).parent / "digits.yaml"
SEED: Final = 0
PICTURES: Final = 2500


def main() -> None:
    """All of it, saying what takes how long."""
    pictures = learned(PICTURES, SEED)
    for name, size in restore.SIZES.items():
        begun_s = time.monotonic()
        write(restore.train(size, pictures, SEED), path_of("restore", name))
        _say(f"restore {name}: {time.monotonic() - begun_s:.0f} s")
    for name, look in read.SIZES.items():
        begun_s = time.monotonic()
        write(read.train(look, pictures, SEED), path_of("read", name))
        _say(f"read {name}: {time.monotonic() - begun_s:.0f} s")
    found = measure()
    TABLE.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    APPLICATION.write_text(with_accuracies(APPLICATION.read_text(), found))
    _say(table(found))


def with_accuracies(text: str, found: Measured) -> str:
    """The application file with these accuracies in the lines of its models."""
    for stage, accuracies in (("restore", found.restore), ("read", found.read)):
        for name, accuracy in accuracies.items():
            line = rf"(model: \./models/{stage}-{name}\.onnx, accuracy: )[\d.]+"
            text, count = re.subn(line, rf"\g<1>{accuracy}", text)
            assert count == 1, f"the application file has {count} lines of {stage}-{name}"
    return text


def table(found: Measured) -> str:
    """Every pair, measured and as the product says."""
    lines = [f"whole pictures right of {found.pictures:,} held out, % (product of the stages' accuracies)"]
    for restorer, accuracy in found.restore.items():
        pairs = (f"{b} {found.both[restorer][b]:.1f} ({found.product(restorer, b):.1f})" for b in READERS)
        lines.append(f"restore {restorer} {accuracy:.1f}: read " + ", ".join(pairs))
    alone = ", ".join(f"{name} {accuracy:.1f}" for name, accuracy in found.read.items())
    return "\n".join(
        [*lines, f"read alone, of pictures as drawn: {alone}", f"apart at most {found.apart():.1f} points"]
    )


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
