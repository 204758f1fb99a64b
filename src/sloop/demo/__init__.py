"""The demonstration: a real model under bursts, served and simulated by `static` and by `sponge`; and example files.

Read `run` first (settings for this machine, and the runs), then `live` (a server under load) and `page` (the report).
"""

from importlib import resources
from pathlib import Path
from typing import Final

from sloop.errors import InputError

MODEL: Final = "digits.onnx"
"""A trained network of 36,000 weights, made by `python -m examples.digits.make`. Input: pictures of six handwritten
digits, 28 × 168 pixels; output: six digits. It takes about 2 ms on one core, so that a deadline of 100 ms can be missed
under load."""

REQUEST: Final = "request.json"
"""A request to it, with a picture of handwriting that it has not learned from (`examples/digits/pictures.py`)."""

APPLICATION: Final = """\
name: digits
slo_ms: 100                # end to end, from sending to the answer
stages:
  - name: read
    model: ./digits.onnx
"""

SCENARIO: Final = """\
name: wave
slo_ms: 100
stages:
  - name: read
    model: ./digits.onnx
trace: {kind: square, rate: 20, burst_rate: 200, period_s: 20, burst_s: 5}
duration_s: 60
systems: [elastic, early-drop]
"""


def write_example(folder: Path) -> list[Path]:
    """Write a small model, a request to it, an application and a scenario to `folder`. Raises `InputError` if a file
    there differs."""
    contents = {
        **{name: resources.files("sloop.demo").joinpath(name).read_bytes() for name in (MODEL, REQUEST)},
        "app.yaml": APPLICATION.encode(),
        "wave.yaml": SCENARIO.encode(),
    }
    for name, content in contents.items():
        if (folder / name).exists() and (folder / name).read_bytes() != content:
            raise InputError("the file exists with other content", where=str(folder / name), help="use an empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return [folder / name for name in contents]
