"""The page in a real browser, before a real server: Chromium, driven by Playwright.

`CHROMIUM=/path/to/chromium` names the browser; without it, the first one found is taken.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from sloop.app.application import SystemChoice
from sloop.app.load import load_scenario
from sloop.page.report import log_page, page
from sloop.report.plots import Figure, Panel, Series
from sloop.report.sections import Section
from sloop.report.tables import Table
from sloop.runlog import read_log
from sloop.sim.scenarios import run_scenario

CHROMIUM: Final = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.live,
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no browser: apt-get install chromium, or name one by CHROMIUM="),
    pytest.mark.xdist_group("browser"),
]
playwright = pytest.importorskip("playwright.sync_api", reason="no driver: pip install playwright")

VIEWS: Final = ("now", "decisions", "request", "plan", "what-if", "try-it", "log")
NAME: Final = "job-17"
MODEL: Final = Path(__file__).parents[2] / "src/sloop/demo/digits.onnx"
SCENARIO: Final = Path(__file__).parents[2] / "examples/three/bursts.yaml"
PROFILE: Final = {
    "latency_ms": {"form": "amdahl", "gamma": 1, "epsilon": 1, "delta": 0, "eta": 3},
    "max_batch": 8,
    "max_cores": 2,
    "load_s": 1,
    "memory_bytes": 50_000_000,
}
SIZED: Final = {
    "latency_ms": {"form": "quadratic", "alpha": 0.0, "beta": 2.0, "gamma": 10.0},
    "max_batch": 8,
    "max_cores": 4,
    "sizes": [
        {"size": size, "latency_ms": {"form": "quadratic", "alpha": 0.0, "beta": beta, "gamma": 10.0}}
        for size, beta in ((16, 2.0), (512, 64.0))
    ],
}
SETTLED_MS: Final = 20_000


class Served(NamedTuple):
    """A server that runs."""

    process: subprocess.Popen[bytes]
    page: str | None
    http: str
    folder: Path


def start(folder: Path, *options: str) -> Served:
    """Serve the digits with a page at a free port."""
    stages = [{"name": "read", "model": str(MODEL), "profile": PROFILE}]
    app = {"name": "digits", "slo_ms": 100, "stages": stages, "shadow": ["static", {"name": "static", "cores": 64}]}
    (folder / "app.yaml").write_text(json.dumps(app))
    command = [sys.executable, "-m", "sloop", "serve", "app.yaml", "--http-port", "0", "--grpc-port", "0", "--json"]
    with (folder / "stderr").open("wb") as stderr:
        process = subprocess.Popen([*command, *options], cwd=folder, stdout=subprocess.PIPE, stderr=stderr)
    assert process.stdout is not None
    said = b""
    while not said.rstrip().endswith(b"}"):
        line = process.stdout.readline()
        assert line, (folder / "stderr").read_text()
        said += line
    told = json.loads(said)
    return Served(process, told["page"], told["http"], folder)


def address_of(served: Served) -> str:
    assert served.page is not None
    return served.page.removeprefix("http://")


def stop(served: Served) -> None:
    served.process.send_signal(signal.SIGCONT)
    served.process.send_signal(signal.SIGINT)
    served.process.wait(60)
    assert served.process.stdout is not None
    served.process.stdout.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that has answered two requests and could not answer a third in time."""
    found = start(tmp_path_factory.mktemp("served"))
    try:
        while not answered(f"{found.http}/v2/health/ready"):
            time.sleep(0.1)
        for name, slo_ms in (("plain", 5_000), (NAME, 5_000), (NAME, 1)):
            infer(found, name, slo_ms)
        yield found
    finally:
        stop(found)


def infer(served: Served, name: str, slo_ms: float) -> None:
    """Send a request until it is answered or refused, whatever the answer."""
    shape = [1, 28, 168]
    tensor = {"name": "restored", "datatype": "FP32", "shape": shape, "data": [0.0] * (28 * 168)}
    headers = {"content-type": "application/json", "x-slo-ms": str(slo_ms)}
    body = json.dumps({"id": name, "inputs": [tensor]}).encode()
    answered(urllib.request.Request(f"{served.http}/v2/models/digits/infer", body, headers))


def answered(request: urllib.request.Request | str) -> bool:
    """Whether the server answers with 200."""
    try:
        urllib.request.urlopen(request, timeout=30).close()
    except urllib.error.HTTPError as error:
        error.close()
        return False
    return True


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield opened
        opened.close()


class Tab:
    """A page of the browser, which fails the test for any error that it reports."""

    def __init__(self, browser: Any, width: int = 1600) -> None:
        self.page = browser.new_context(viewport={"width": width, "height": 1000}).new_page()
        self.page.set_default_timeout(SETTLED_MS)
        self.problems: list[str] = []
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("dialog", lambda dialog: self.problems.append(f"a dialog: {dialog.message}"))
        self.page.on("console", self._note)

    def _note(self, message: Any) -> None:
        if message.type == "error" and not re.search("ERR_CONNECTION|status of 4", message.text):
            self.problems.append(message.text)

    def open(self, url: str | None, view: str = "now") -> None:
        self.page.goto(f"{url}/#{view}")
        self.page.wait_for_selector("nav a[aria-current=page]")

    def text(self) -> str:
        return str(self.page.inner_text("body"))

    def close(self) -> None:
        self.page.context.close()
        assert not self.problems


@pytest.fixture
def tab(browser: Any) -> Iterator[Tab]:
    made = Tab(browser)
    yield made
    made.close()


def test_all_is_well_at_a_glance_and_the_numbers_are_those_of_the_server(served: Served, tab: Tab) -> None:
    tab.open(served.page)
    tab.page.wait_for_selector(".glance")
    row = tab.page.locator("table").first.locator("tbody tr").first.inner_text()
    assert row.startswith("digits")
    assert "100 ms" in row
    assert "1 of 1" in row
    tab.page.wait_for_function("document.querySelectorAll('canvas').length === 3")


@pytest.mark.parametrize("width", [400, 1600])
@pytest.mark.parametrize("view", VIEWS)
def test_each_view_fits_is_reached_by_keyboard_and_can_be_read_by_all(
    served: Served, browser: Any, view: str, width: int
) -> None:
    tab = Tab(browser, width)
    tab.open(served.page)
    for _ in range(20):
        tab.page.keyboard.press("Tab")
        if tab.page.evaluate("document.activeElement.getAttribute('href')") == f"#{view}":
            break
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_selector(f"nav a[href='#{view}'][aria-current=page]")
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    serious = [
        f"{found['id']}: {node['html']}"
        for found in axe.run(tab.page).response["violations"]
        if found["impact"] in {"serious", "critical"}
        for node in found["nodes"]
    ]
    assert not serious
    tab.close()


def test_shadows_say_what_they_would_have_now_and_why_they_have_ended(served: Served, tab: Tab) -> None:
    tab.open(served.page)
    row = tab.page.locator("[aria-label=shadows] tr", has_text="static: the configured replicas")
    row.wait_for(timeout=60_000)
    assert row.inner_text().split("\t")[:1] == ["static"]
    assert "1 × read on" in row.inner_text()
    ended = tab.page.locator("[aria-label=shadows] tr", has_text="static (cores 64)")
    ended.get_by_text("ended:").wait_for(timeout=60_000)


def test_a_decision_says_what_was_and_why(served: Served, tab: Tab) -> None:
    tab.open(served.page, "decisions")
    first = tab.page.locator("li.decision").last.inner_text()
    assert "plan" in first
    assert "the first plan" in first


def test_the_story_of_a_request_is_found_by_its_clients_name(served: Served, tab: Tab) -> None:
    tab.open(served.page, "request")
    assert NAME in tab.text()
    tab.page.fill("form input", NAME)
    tab.page.click("text=Tell its story")
    tab.page.wait_for_selector("article")
    assert "its 1 ms" in tab.page.inner_text("article")
    assert tab.page.locator("article svg.bars rect").count() > 0
    tab.page.fill("form input", "12345678")
    tab.page.click("text=Tell its story")
    assert "not in this log" in tab.page.inner_text("[role=alert]")


def test_a_plan_for_another_rate(served: Served, tab: Tab) -> None:
    tab.open(served.page, "plan")
    tab.page.fill("input[type=number]", "50")
    tab.page.click("text=What would this need?")
    tab.page.wait_for_selector("article")
    assert "feasible" in tab.page.inner_text("article")
    tab.page.fill("label input", "nonsense")
    tab.page.click("text=What would this need?")
    assert "nonsense" in tab.page.inner_text("[role=alert]")


def test_what_if_compares_what_happened_with_other_systems(served: Served, tab: Tab) -> None:
    tab.open(served.page, "what-if")
    tab.page.fill("label input", "{name: static, replicas: 1}, nonsense")
    tab.page.click("form button")
    tab.page.wait_for_selector("article", timeout=60_000)
    text = tab.page.inner_text("article")
    assert text.index("happened") < text.index("simulated as it ran") < text.index("static (replicas 1)")
    assert "unknown system 'nonsense'" in text
    command = re.search(r"sloop (simulate .*)", text)
    assert command is not None
    assert "--last-s 600 --system" in command[1]


def test_one_request_is_tried(served: Served, tab: Tab) -> None:
    tab.open(served.page, "try-it")
    tab.page.wait_for_selector("textarea")
    tab.page.fill("textarea", json.dumps([0.5] * (28 * 168)))
    tab.page.click("text=Send one request")
    tab.page.wait_for_selector("article")
    text = tab.page.inner_text("article")
    assert '"model_name": "digits"' in text
    assert "tritonclient" in text
    tab.page.fill("textarea", "1, 2")
    tab.page.click("text=Send one request")
    assert "2 elements" in tab.page.inner_text("[role=alert]")


def test_a_report_is_one_file_and_nothing_hostile_in_it_runs(tmp_path: Path, tab: Tab) -> None:
    hostile = "</script><img src=x onerror=alert(1)>"
    panel = Panel(y_label=hostile, series=(Series(hostile, (0.0, 1.0), (1.0, 2.0)),))
    figure = Figure(name="hostile", title=hostile, x_label=hostile, panels=(panel,), alt=hostile)
    section = Section(title=hostile, text=(hostile,), tables=(Table(hostile, (hostile, "n"), ((hostile, 1),)),))
    text = page(hostile, [section, Section(title="Drawn", figures=(figure,))], facts=[(hostile, hostile)])
    (tmp_path / "report.html").write_text(text)
    tab.page.goto((tmp_path / "report.html").as_uri())
    tab.page.wait_for_selector("main table")
    assert tab.page.inner_text("main h2") == hostile
    assert tab.page.inner_text("tbody th") == hostile
    assert tab.page.title() == hostile
    assert [link.inner_text() for link in tab.page.locator("nav a").all()] == ["Summary"]
    assert tab.page.evaluate(
        "[...document.images].every((image) => image.src.startsWith('data:') && image.naturalWidth)"
    )


def test_the_log_of_a_run_as_a_page_has_its_views(tmp_path: Path, tab: Tab) -> None:
    scenario = replace(load_scenario(SCENARIO), duration_s=8.0)
    made = run_scenario(scenario, SystemChoice("elastic"), log=tmp_path / "run.jsonl")
    text = log_page(read_log(tmp_path / "run.jsonl"), made=datetime(2026, 11, 30, tzinfo=UTC))
    (tmp_path / "report.html").write_text(text)
    tab.page.goto((tmp_path / "report.html").as_uri())
    tab.page.wait_for_selector("main table")
    assert f"{made.row.requests:,} requests" in tab.text()
    for view, expected in (("Now", "restore"), ("Decisions", "the first plan"), ("Requests", "dropped")):
        tab.page.click(f"nav a:has-text('{view}')")
        tab.page.locator("main", has_text=expected).wait_for()


@pytest.fixture(scope="module")
def overseen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run of rows of several sizes under an autopilot, then under another system. Its log ends while a
    batch runs."""
    folder = tmp_path_factory.mktemp("overseen")
    among = [{"name": "static", "replicas": count, "cores": 1} for count in (3, 1)]
    scenario = load_scenario(
        {
            "name": "texts",
            "slo_ms": 900,
            "stages": [{"name": "read", "profile": SIZED, "sizes": [512], "pad": {"ids": 0}}],
            "system": {"name": "autopilot", "among": among, "every_s": 60, "target": 0.9},
            "cluster": {"nodes": [{"hardware": "custom", "count": 1, "cores": 4, "memory_bytes": 10**9}]},
            "trace": {"kind": "poisson", "rate": 6, "rows": 2, "sizes": [16, 264]},
            "duration_s": 330,
            "seed": 4,
            "changes": [{"at_s": 300, "application": "texts", "system": {"name": "hpa", "target": 0.6}}],
        }
    )
    run_scenario(scenario, scenario.systems[0], log=folder / "run.jsonl")
    lines = (folder / "run.jsonl").read_bytes().splitlines(keepends=True)
    last = max(place for place, line in enumerate(lines) if b'"start_batch"' in line)
    (folder / "cut.jsonl").write_bytes(b"".join(lines[: last + 1]))
    text = log_page(read_log(folder / "cut.jsonl"), made=datetime(2026, 11, 30, tzinfo=UTC))
    (folder / "report.html").write_text(text)
    return folder / "report.html"


def test_an_autopilot_shows_the_numbers_that_it_has_compared_and_an_order_who_decides_since(
    overseen: Path, tab: Tab
) -> None:
    tab.page.goto(f"{overseen.as_uri()}#decisions")
    tab.page.select_option("label:has-text('Kind') select", "overseer")
    told = [each.inner_text().splitlines() for each in tab.page.locator("li.decision").all()]
    said = [next(line for line in lines if "static" in line) for lines in told][::-1]
    assert "wins, 1 of 3 times in a row" in " ".join(told[-1])
    assert any("static (replicas 1, cores 1) decides" in line for line in said)
    compared = [line for line in told[0] if "in time for" in line]
    assert [line.split(" in time")[0].rsplit(" (", 1)[0].rsplit(" ", 2)[0] for line in compared] == [
        "static (replicas 3, cores 1)",
        "static (replicas 1, cores 1)",
    ], "one line each"
    tab.page.select_option("label:has-text('Kind') select", "system")
    (changed,) = tab.page.locator("li.decision").all()
    assert "hpa (target 0.6) decides from now on, where autopilot (among [{name: static, rep" in changed.inner_text()


def test_sizes_rows_and_padding_are_shown_where_the_replicas_are(overseen: Path, tab: Tab) -> None:
    tab.page.goto(f"{overseen.as_uri()}#now")
    table = tab.page.locator("[aria-label=replicas]")
    table.wait_for()
    running = [row for row in table.locator("tbody tr").all() if "of sizes up to 512" in row.inner_text()]
    assert running
    assert re.search(r"[2-8] of 8, of sizes up to 512", running[0].inner_text())
    assert re.search(r"[\d.]+ % of what read has computed was padding", tab.text())
    assert "System hpa (target 0.6)." in tab.text()


def test_a_killed_server_is_stale_and_the_page_comes_back_by_itself(tmp_path: Path, tab: Tab) -> None:
    before = start(tmp_path)
    address = address_of(before)
    try:
        tab.open(before.page)
        before.process.send_signal(signal.SIGSTOP)
        tab.page.wait_for_selector("main.stale", timeout=10_000)
        assert "has not answered" in tab.page.inner_text("[role=alert]")
        before.process.send_signal(signal.SIGCONT)
        tab.page.wait_for_selector("main:not(.stale)")
        before.process.kill()
        tab.page.wait_for_selector("main.stale", timeout=10_000)
        assert "away" in tab.page.inner_text("[role=alert]")
    finally:
        stop(before)
    after = start(tmp_path, "--page", address)
    try:
        tab.page.wait_for_selector("main:not(.stale)")
    finally:
        stop(after)


def test_the_key_is_asked_for_and_opens_the_page(tmp_path: Path, tab: Tab) -> None:
    (tmp_path / "keys").write_text("tester sesame\n")
    found = start(tmp_path, "--api-key-file", "keys")
    try:
        tab.page.goto(found.page)
        tab.page.fill("input[type=password]", "wrong")
        tab.page.click("text=Open the page")
        assert "wrong" in tab.page.inner_text("[role=alert]")
        tab.page.fill("input[type=password]", "sesame")
        tab.page.click("text=Open the page")
        tab.page.wait_for_selector("nav")
        assert tab.page.evaluate("document.cookie") == ""
        tab.page.reload()
        tab.page.wait_for_selector("nav")
    finally:
        stop(found)


def test_a_page_that_cannot_be_opened_is_no_reason_not_to_serve(served: Served, tmp_path: Path) -> None:
    second = start(tmp_path, "--page", address_of(served))
    stop(second)
    assert second.page is None
    assert "there is no page" in (tmp_path / "stderr").read_text()
