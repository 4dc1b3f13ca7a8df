"""The page of `instep watch` in a real Chromium: its numbers are the log's, and it follows a run through restarts."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import commands
import patience
import rings
from instep.events.read import read_events
from watched import NASTY, Site, Writer, served, write_eventful_run, write_many_steps

# Slow: test_page_server.py has the server's part, test_page_tables.py the tables'; here is what only a browser does.
pytestmark = [pytest.mark.slow, rings.unless("browser")]
FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-sync"
OPEN_MS = 1000
CPU_SHARE = 0.05
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of two runs that are over; the name of one is HTML."""
    folder = tmp_path_factory.mktemp("runs")
    write_eventful_run(folder / "eventful", num_steps=3000)
    write_eventful_run(folder / "<b onclick=x>&amp;#1", num_steps=800, seed=1, slow_rank=None)
    return folder


@pytest.fixture(scope="module")
def site(folder: Path) -> Iterator[Site]:
    with served(folder) as site:
        yield site


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_path(), args=FLAGS.split())
        yield browser
        browser.close()


@pytest.fixture
def page_of(chromium: Any) -> Iterator[Open]:
    """Return a function that opens an address, and check in the end that nothing went wrong in the page."""
    contexts, complaints = [], []

    def open_page(address: str, width: int = 1300, height: int = 900, scheme: str = "light") -> Any:
        contexts.append(chromium.new_context(viewport={"width": width, "height": height}, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.set_default_timeout(20_000 * patience.PATIENCE)
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(address)
        page.wait_for_selector("[data-chart=loss] canvas")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert [text for text in complaints if "ERR_CONNECTION_REFUSED" not in text] == []


def _path() -> str:
    import shutil

    path = shutil.which("chromium")
    assert path is not None
    return path


def wait_for(page: Any, script: str, timeout_s: float = 20) -> None:
    """Wait until a script is true in the page; the page's own policy forbids what playwright would do."""
    commands.wait_for(lambda: page.evaluate(script), timeout_s)


def tile(page: Any, name: str) -> float:
    return float(page.get_attribute(f"[data-tile='{name}']", "data-value"))


class TestAFinishedRun:
    def test_the_numbers_are_the_log_s(self, site: Site, folder: Path, page_of: Open) -> None:
        page = page_of(f"{site.address}#eventful")
        wait_for(page, "document.querySelector(\"[data-tile='step']\")?.dataset.value === '3000'")
        events = read_events(folder / "eventful")
        last = [event for event in events if event["event"] == "step"][-1]
        metrics = [event["metrics"] for event in events if event["event"] == "eval"][-1]
        mean = [event["loss"] for event in events if event["event"] == "epoch"][-1]
        shown = {name: tile(page, name) for name in ("loss", "learning rate", "gradient norm", "kl", "accuracy")}
        assert shown == {
            "loss": last["loss"],
            "learning rate": last["lr"],
            "gradient norm": last["grad_norm"],
            "kl": last["scalars"]["kl"],
            "accuracy": metrics["accuracy"],
        }
        legend = {
            line: float(page.get_attribute(f"[data-chart=loss] [data-line='{line}']", "data-value"))
            for line in ("step", "epoch mean", "evaluation")
        }
        assert legend == {"step": last["loss"], "epoch mean": mean, "evaluation": metrics["eval_loss"]}
        page.click("label:has(input[value=whole])")
        for rank in range(4):
            records = [event for event in read_events(folder / "eventful", rank) if event["event"] == "phases"]
            data_s = float(page.get_attribute(f"tr[data-rank='{rank}'] [data-phase=data]", "data-seconds"))
            assert data_s == pytest.approx(sum(record["phases"]["data"] for record in records), abs=1e-3)
        assert page.locator("td[data-odd]").count() == 1
        assert "Rank 2 spends 55 % of its time in data" in page.inner_text("#phases")

    def test_what_a_run_says_stays_text(self, site: Site, page_of: Open) -> None:
        page = page_of(f"{site.address}#eventful&%3Cb%20onclick%3Dx%3E%26amp%3B%231")
        wait_for(page, "document.querySelectorAll('.compare tbody tr').length === 2")
        assert "<b onclick=x>&amp;#1" in page.inner_text("#runs")
        assert NASTY in page.inner_text("#marks")
        wait_for(page, "document.querySelector('.log').textContent.includes('the end')")
        assert NASTY in page.inner_text(".log")
        assert page.evaluate("document.body.dataset.pwned === undefined")
        assert page.locator("#main img").count() == 0

    def test_marks_show_their_sentence_on_the_axis(self, site: Site, page_of: Open) -> None:
        page = page_of(f"{site.address}#eventful")
        assert "restart 1, on 4 processes" in page.inner_text("#marks")
        assert "rank 3: RuntimeError: worker 3 is out of cheese" in page.inner_text("#marks")
        page.wait_for_selector(".verdict")  # it moves the charts
        box = page.locator("[data-chart=loss] .u-over").bounding_box()
        page.mouse.move(box["x"] + box["width"] * 900 / 3000, box["y"] + box["height"] / 2)
        page.wait_for_selector("[data-chart=loss] .tip:not([hidden])")
        assert "the loss of step 900 is nan" in page.inner_text("[data-chart=loss] .tip")

    def test_zooming_in_shows_every_step(self, site: Site, folder: Path, page_of: Open) -> None:
        page = page_of(f"{site.address}#eventful")
        page.wait_for_selector(".verdict")  # it moves the charts
        box = page.locator("[data-chart=loss] .u-over").bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 40)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.52, box["y"] + 40, steps=4)
        with page.expect_response(lambda answer: "api/window" in answer.url) as answered:
            page.mouse.up()
        window = answered.value.json()
        steps = [bucket[0] for bucket in window["train"]["loss"]]
        assert steps == list(range(steps[0], steps[-1] + 1))
        page.click("#reset-zoom")
        assert not page.is_visible("#reset-zoom")

    def test_logs_of_any_rank(self, site: Site, page_of: Open) -> None:
        page = page_of(f"{site.address}#eventful")
        page.wait_for_selector("#logs:not([hidden])")
        page.select_option("#logs select", "rank-3.log")
        wait_for(page, "document.querySelector('.log').textContent.includes('rank 3: batch 2999')")
        page.click("text=earlier")
        wait_for(page, "document.querySelector('.log').textContent.includes('rank 3: batch 1000 ')")

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_dark_and_light(self, site: Site, page_of: Open, scheme: str) -> None:
        page = page_of(f"{site.address}#eventful", scheme=scheme)
        background, text = (_brightness(page, name) for name in ("background-color", "color"))
        assert (background > 200 > 100 > text) if scheme == "light" else (background < 60 < 180 < text)
        page.click("#theme")  # auto to light
        page.click("#theme")  # to dark
        assert _brightness(page, "background-color") < 60

    @pytest.mark.parametrize("width", [320, 390])
    def test_a_phone(self, site: Site, page_of: Open, width: int) -> None:
        page = page_of(f"{site.address}#eventful", width=width, height=840)
        page.wait_for_selector("#phases:not([hidden])")
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.locator("[data-chart=loss] canvas").bounding_box()["width"] < width
        assert not page.is_visible("#runs")
        page.click("#toggle-runs")
        assert page.is_visible("#runs")

    def test_the_browser_merges_as_the_server_does(self, tmp_path: Path, site: Site, page_of: Open) -> None:
        """What store.js makes of many small messages is what one message says that has everything."""
        log = Writer(tmp_path / "run", world_size=1)
        log.start(num_steps=20_000)
        messages = []
        with served(tmp_path / "run") as other, other.stream("run") as stream:
            messages.append(stream.whole())
            for first in (1, 401, 2001, 2002, 4097, 9000):
                if first == 9000:
                    log.start(attempt=1, first_step=2500, num_steps=20_000)
                    log.steps(2501, 7000)
                else:
                    log.steps(first, {1: 400, 401: 2000, 2001: 2001, 2002: 4096, 4097: 8999}[first])
                step = 7000 if first == 9000 else None
                messages.append(stream.until(lambda message: message.get("tables")))
                while step and messages[-1]["facts"]["step"] != step:
                    messages.append(stream.next())
            with other.stream("run") as late:
                whole = late.whole()
        script = """async (messages) => {
            const { RunData } = await import('./static/js/store.js');
            const run = new RunData('run');
            for (const message of messages) run.take(message);
            return JSON.stringify([run.tables.train.level, run.tables.train.series]);
        }"""
        page = page_of(site.address)
        level, series = json.loads(page.evaluate(script, messages))
        assert level == whole["tables"]["train"]["level"]
        assert series == whole["tables"]["train"]["series"]


def _brightness(page: Any, name: str) -> float:
    color = page.evaluate(f"getComputedStyle(document.body).getPropertyValue('{name}')")
    return sum(map(int, color.removeprefix("rgb(").removesuffix(")").split(","))) / 3


@pytest.mark.timeout(240)
def test_it_follows_a_training_through_a_restart(tmp_path: Path, page_of: Open) -> None:
    run_dir = tmp_path / "runs" / "digits"
    words = ("-n", "2", "--steps", "1500", "--save-every", "50", "--run-dir", str(run_dir), "--quiet")
    training = commands.start("instep", "train", "examples/digits.py", *words)
    try:
        commands.wait_for(lambda: len(commands.steps_in(run_dir)) > 60, 60)
        with served(tmp_path / "runs") as site:
            page = page_of(site.address)
            seen = [tile(page, "step")]
            wait_for(page, f"Number(document.querySelector(\"[data-tile='step']\").dataset.value) > {seen[0] + 30}", 60)
            os.kill(commands.pids_of(run_dir, 2)[1], signal.SIGKILL)
            wait_for(
                page,
                "document.querySelector('#marks').textContent.includes('restart 1 of 3 after rank 1: killed')",
                60,
            )
            _, err = training.communicate(timeout=120)
            assert training.returncode == 0, err
            wait_for(page, "document.querySelector(\"[data-tile='step']\").dataset.value === '1500'", 60)
            wait_for(page, "document.querySelector('.chip').textContent === 'complete'", 60)
            last = commands.steps_in(run_dir)[-1]
            assert tile(page, "loss") == last["loss"]
            assert tile(page, "restarts") == 1
            assert page.locator("tr[data-rank]").count() == 2
            assert "bounded the speed" in page.inner_text(".verdict") or "Nothing" in page.inner_text(".verdict")
    finally:
        if training.poll() is None:
            os.killpg(training.pid, signal.SIGKILL)
            training.communicate()


def test_a_server_that_ends_is_noticed(tmp_path: Path, page_of: Open) -> None:
    log = Writer(tmp_path / "run", world_size=1)
    log.start()
    log.steps(1, 20)
    with served(tmp_path / "run") as site:
        page = page_of(site.address)
        wait_for(page, "document.querySelector('#connection').textContent === 'live'")
    wait_for(page, "document.querySelector('#connection').textContent === 'no connection'")


@pytest.mark.timeout(400)
@pytest.mark.alone
def test_a_million_events_and_a_million_more(tmp_path: Path, page_of: Open) -> None:
    write_many_steps(tmp_path / "run", 1, 1_000_000)
    server = commands.start("instep", "watch", str(tmp_path / "run"), "--no-open")
    try:
        assert server.stdout is not None
        page = page_of(server.stdout.readline().strip())
        opened_ms = page.evaluate("performance.getEntriesByName('first curve')[0].startTime")
        assert opened_ms < OPEN_MS * patience.PATIENCE
        wait_for(page, "!document.body.textContent.includes('A long log')", 100)
        assert tile(page, "step") == 1_000_000
        spike = page.evaluate("fetch('api/window?run=run&from=0&to=1000000').then((answer) => answer.json())")
        assert 40.0 in [value for bucket in spike["train"]["loss"] for value in bucket[2::3]]
        write_many_steps(tmp_path / "run", 1_000_001, 2_000_000)
        wait_for(page, "document.querySelector(\"[data-tile='step']\").dataset.value === '2000000'", 100)
        process = psutil.Process(server.pid)
        before_s = sum(process.cpu_times()[:2])
        page.wait_for_timeout(5000)
        share = (sum(process.cpu_times()[:2]) - before_s) / 5
        print(f"first curve after {opened_ms:.0f} ms; then {share:.1%} of a core")
        assert share < CPU_SHARE
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=20)
