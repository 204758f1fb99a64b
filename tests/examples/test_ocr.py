"""The ocr example: what its stages read off pictures whose text is known, one after the other and served as a graph."""

import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import numpy as np
import pytest

from sloop.app.load import load_application, load_scenario
from sloop.cli import main
from sloop.profile.model import Session, open_model
from sloop.sim.scenarios import run_scenario
from sloop.user_code import module_in

pytest.importorskip("rapidocr", reason="the networks come with the rapidocr package: pip install rapidocr")

FOLDER = Path(__file__).parents[2] / "examples" / "ocr"


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    """The module that draws."""
    return module_in(FOLDER / "pictures.py")


@pytest.fixture(scope="module")
def stages() -> dict[str, Session]:
    return {name: open_model(FOLDER / f"{name}.py", 1) for name in ("detect", "orient", "recognise")}


def text_of(lines: np.ndarray[Any, Any]) -> str:
    return "\n".join(line.tobytes().rstrip(b"\0").decode() for line in lines)


def read(stages: dict[str, Session], pixels: np.ndarray[Any, Any], *, orient: bool = True) -> str:
    strips, widths = stages["detect"].run({"image": pixels[None]})
    (upright,) = stages["orient"].run({"strips": strips, "widths": widths}) if orient else (strips,)
    return text_of(stages["recognise"].run({"upright": upright})[0])


def accuracy(pictures: ModuleType, answers: Sequence[tuple[str, str]]) -> tuple[float, float]:
    """The share of words right, and errors per character."""
    right = [pictures.words_right(said, meant) for said, meant in answers]
    errors = sum(pictures.character_errors(said, meant) for said, meant in answers)
    return sum(r for r, _ in right) / sum(n for _, n in right), errors / sum(len(meant) for _, meant in answers)


def test_what_was_drawn_is_read(pictures: ModuleType, stages: dict[str, Session]) -> None:
    drawn = [pictures.draw(seed) for seed in range(100, 112)]
    meant = ["\n".join(picture.lines) for picture in drawn]
    words, errors = accuracy(pictures, [(read(stages, p.pixels), text) for p, text in zip(drawn, meant, strict=True)])
    assert words >= 0.95
    assert errors <= 0.02
    blind = [(read(stages, p.pixels, orient=False), text) for p, text in zip(drawn[:6], meant, strict=False)]
    assert accuracy(pictures, blind)[0] < 0.9, "some lines stand on their heads"


def test_an_empty_picture_has_no_lines(pictures: ModuleType, stages: dict[str, Session]) -> None:
    assert read(stages, pictures.draw(1, lines=0).pixels) == ""
    assert stages["detect"].run({"image": np.zeros((1, 5, 700, 3), np.uint8)})[0].shape == (0, 48, 320, 3)


def test_pictures_of_other_sizes_are_read(pictures: ModuleType, stages: dict[str, Session]) -> None:
    picture = pictures.draw(5, lines=2)
    assert read(stages, picture.pixels[:150, 5:]) == "\n".join(picture.lines)


def test_rows_of_other_requests_change_nothing(pictures: ModuleType, stages: dict[str, Session]) -> None:
    strips, widths = pictures.strips(6)
    together = stages["orient"].run({"strips": strips, "widths": widths})[0]
    alone = [stages["orient"].run({"strips": strips[[n]], "widths": widths[[n]]})[0][0] for n in range(6)]
    np.testing.assert_array_equal(together, np.stack(alone))
    lines = stages["recognise"].run({"upright": together})[0]
    assert text_of(lines).splitlines() == [line for seed in (0, 1) for line in pictures.draw(seed, lines=4).lines][:6]


def test_measures_of_accuracy(pictures: ModuleType) -> None:
    assert pictures.character_errors("kitten", "sitting") == 3
    assert pictures.character_errors("", "abc") == 3
    assert pictures.words_right("one too three", "one two three four") == (2, 4)
    assert pictures.words_right("", "one") == (0, 1)
    first, again = pictures.draw(9), pictures.draw(9)
    assert (first.lines, first.pixels.tobytes()) == (again.lines, again.pixels.tobytes())


def test_the_application_is_valid_and_its_profiles_are_its_own() -> None:
    application = load_application(FOLDER / "ocr.yaml")
    assert [stage.name for stage in application.order] == ["detect", "orient", "recognise"]
    for stage in application.stages:
        (variant,) = stage.variants
        assert variant.profile is not None
        assert variant.profile.origin == "measured"


@pytest.mark.live
def test_a_user_serves_it_and_reads_what_was_drawn(tmp_path: Path) -> None:
    serve = [sys.executable, "-m", "sloop", "serve", str(FOLDER / "ocr.yaml"), "--json"]
    ports = ["--http-port", "0", "--grpc-port", "0"]
    with subprocess.Popen([*serve, *ports], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = json.loads(server.stdout.readline())["http"]
            ask = [sys.executable, str(FOLDER / "ask.py"), url, "--count", "5", "--seed", "300", "--slo-ms", "20000"]
            said = subprocess.run(ask, capture_output=True, text=True, timeout=60, check=False)
        finally:
            server.send_signal(signal.SIGINT)
    assert said.returncode == 0, said.stderr
    counted = re.search(r"(\d+) of (\d+) words right", said.stdout)
    assert counted is not None, said.stdout
    assert int(counted[1]) >= 0.95 * int(counted[2]), said.stdout


def shown_commands() -> list[list[str]]:
    shell = re.findall(
        r"^```sh\n(.*?)^```", (FOLDER / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    return [shlex.split(line)[1:] for text in shell for line in text.splitlines() if line.startswith("sloop ")]


@pytest.mark.parametrize("words", shown_commands(), ids=" ".join)
def test_commands_shown_parse(words: list[str]) -> None:
    command = main.get_command(click.Context(main), words[0])
    assert command is not None
    command.make_context(words[0], words[1:])


def test_the_simulated_world_is_that_application_under_bursts() -> None:
    scenario = load_scenario(FOLDER / "bursts.yaml")
    assert scenario.application.graph.edges == load_application(FOLDER / "ocr.yaml").graph.edges
    rows = {choice.label: run_scenario(scenario, choice).row for choice in scenario.systems if choice.label != "fa2"}
    assert rows["static"].attainment < 0.9
    assert min(rows["biscale"].attainment, rows["early-drop"].attainment) > 0.95
