"""The HTML pages in a real browser: light and dark, narrow and wide, with 64 ranks.

One browser shows all pages. It has no network, and each test fails if a page loads or logs anything.
"""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import ActionChains, Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from shoal.jobs.job_log import Line
from shoal.report import timeline_page, trace
from shoal.report.job_page import render_comparison_page, render_job_page
from shoal.report.job_report import Curve, JobReport
from shoal.report.timeline_analysis import analyse

pytestmark = pytest.mark.xdist_group("browser")

RANKS, STEPS = 64, 4
SECONDS = 60  # a busy machine may need them
METRICS = ("loss", "accuracy")
LOG = [Line(at / 10, f"algo-{at % 8 + 1}", at % RANKS, f"step {at // RANKS} loss=0.25") for at in range(20 * RANKS)]
NARROW, WIDE = 500, 1400
VIEWS = [(scheme, width) for scheme in ("light", "dark") for width in (NARROW, WIDE)]

Browser = Any  # Chrome, which lacks some types
Show = Callable[[str, str], None]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    subprocess.run(["scripts/browser.sh"], cwd=Path(__file__).resolve().parents[2], check=True)
    options = ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    profile = tmp_path_factory.mktemp("profile")
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.add_argument(f"--user-data-dir={profile}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options, Service("/usr/bin/chromedriver"))
    driver.execute_cdp_cmd("Emulation.setFocusEmulationEnabled", {"enabled": True})
    yield driver
    driver.quit()


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Iterator[Show]:
    """Opens a page, and after the test checks what the browser has loaded and logged."""

    def open_page(html: str, ready: str) -> None:
        """Opens the page and waits until the selector `ready` finds something."""
        (tmp_path / "page.html").write_text(html)
        browser.get((tmp_path / "page.html").as_uri())
        wait_for(browser, lambda: browser.find_elements(By.CSS_SELECTOR, ready))

    for kind in ("browser", "performance"):
        browser.get_log(kind)
    yield open_page
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert urls == [(tmp_path / "page.html").as_uri()]


def wait_for(browser: Browser, condition: Callable[[], Any]) -> Any:
    return WebDriverWait(browser, SECONDS, poll_frequency=0.05).until(lambda _: condition())


def resize(browser: Browser, scheme: str, width: int) -> None:
    """Set the color scheme and the width in pixels, and wait until the page has drawn itself again."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.execute_async_script("const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(done));")


def check_view(browser: Browser, scheme: str, width: int) -> None:
    """Check that the page fits into the window, and that its text contrasts with the background of the scheme."""
    found = browser.execute_script("""
        const light = color => color.match(/[\\d.]+/g).slice(0, 3).reduce((sum, part) => sum + +part / 765, 0);
        const style = getComputedStyle(document.body);
        return [innerWidth, document.documentElement.scrollWidth, light(style.backgroundColor), light(style.color)]""")
    inner, scroll, background, text = found
    assert (inner, scroll) == (width, width)
    assert (background > 0.9, text < 0.2) == ((True, True) if scheme == "light" else (False, False))
    assert abs(background - text) > 0.7


def measure_canvases(browser: Browser) -> list[dict[str, Any]]:
    """Return the width and right edge of each canvas, and the share of its pixels that are drawn on."""
    found: list[dict[str, Any]] = browser.execute_script("""
        return [...document.querySelectorAll("canvas")].map(canvas => {
          const {width, height} = canvas, copy = new OffscreenCanvas(width, height);
          const context = copy.getContext("2d", {willReadFrequently: true});
          context.drawImage(canvas, 0, 0);
          const {data} = context.getImageData(0, 0, width, height), box = canvas.getBoundingClientRect();
          return {drawn: data.filter((value, at) => at % 4 == 3 && value > 64).length / width / height,
            width: box.width, right: box.right};
        })""")
    return found


def check_canvases(browser: Browser, number: int, width: int) -> None:
    """Check that this many canvases have drawings, and are as wide as the window allows."""
    canvases = measure_canvases(browser)
    assert len(canvases) == number
    for canvas in canvases:
        assert canvas["drawn"] > 0.02
        assert 300 < canvas["width"] < canvas["right"] <= width


def make_report(name: str, offset: float = 0.0) -> JobReport:
    metrics = [
        Curve(metric, f"algo-{rank % 8 + 1}", rank, [*range(50)], [offset + rank / (at + 9) for at in range(50)])
        for metric in METRICS
        for rank in range(RANKS)
    ]
    usage = [Curve("CPU", f"algo-{host + 1}", None, [*range(50)], [host + at for at in range(50)]) for host in range(8)]
    settings = {"hyperparameters": {"lr": str(0.1 + offset)}}
    report = JobReport(name, "2026-01-31 12:00:00", 0, metrics=metrics, usage=usage, settings=settings, log=LOG)
    return replace(report, plan=[("command", "mpirun " + 60 * "--option ")], summary=[("training time", "12 s")])


def rows_of(browser: Browser) -> list[str]:
    """Return the lines of the log that the browser shows, also those just outside of its box."""
    found: list[str] = browser.execute_script(
        """return [...document.querySelectorAll("[aria-label=Log] div")].filter(row => !row.querySelector("div"))
        .map(row => [...row.childNodes].map(part => part.textContent).join(" "))"""
    )
    return found


def test_page_of_a_job(browser: Browser, show: Show) -> None:
    show(render_job_page(make_report("digits-1")), "[aria-label=Log] div div div")
    for scheme, width in VIEWS:
        resize(browser, scheme, width)
        check_view(browser, scheme, width)
        check_canvases(browser, 1 + len(METRICS), width)
        assert len(rows_of(browser)) > 20


def test_search_and_rank_filter_the_log(browser: Browser, show: Show) -> None:
    resize(browser, "light", WIDE)
    show(render_job_page(make_report("digits-1")), "[aria-label=Log] div div div")
    count = browser.find_element(By.TAG_NAME, "output")
    search = browser.find_element(By.CSS_SELECTOR, "[aria-label='Search the log']")
    rank = browser.find_element(By.CSS_SELECTOR, "[aria-label=Rank]")
    host = browser.find_element(By.CSS_SELECTOR, "[aria-label=Host]")
    assert count.text == f"{len(LOG):,} of {len(LOG):,} lines"

    search.send_keys("STEP 7 ")
    wait_for(browser, lambda: count.text.startswith(f"{RANKS} of"))
    assert all("step 7 loss" in row for row in rows_of(browser))
    host.send_keys("algo-6")
    wait_for(browser, lambda: count.text.startswith("8 of"))
    rank.send_keys("rank 37")
    wait_for(browser, lambda: count.text.startswith("1 of"))
    (row,) = rows_of(browser)
    assert row.split() == ["48.5", "algo-6", "37", "step", "7", "loss=0.25"]

    search.send_keys(Keys.CONTROL, "a", Keys.NULL, Keys.BACKSPACE)
    wait_for(browser, lambda: count.text.startswith("20 of"))
    assert [row.split()[1:5] for row in rows_of(browser)] == [["algo-6", "37", "step", str(step)] for step in range(20)]
    rank.send_keys("rank 36")
    wait_for(browser, lambda: count.text.startswith("0 of"))
    assert rows_of(browser) == [""] or rows_of(browser) == []


def test_values_that_are_not_finite_are_marked(browser: Browser, show: Show) -> None:
    steps = [*range(0, 500, 10)]
    curve = Curve("loss", "algo-1", 0, steps, [1.0] * 50, [step * 2 for step in steps], "step", [(55.0, 110.0, "nan")])
    empty = Curve("gap", "algo-1", 0, [], [], marks=[(1.5, None, "inf"), (2.5, None, "-inf")])
    show(render_job_page(replace(make_report("digits-1"), metrics=[curve, empty], usage=[])), "canvas")
    resize(browser, "light", WIDE)
    notes = [note.text for note in browser.find_elements(By.CSS_SELECTOR, ".card .bad")]
    assert notes == ["✕ nan at step 110, rank 0", "✕ inf at 1.5 s, rank 0, and 1 more"]
    assert [legend.text.split()[0] for legend in browser.find_elements(By.CSS_SELECTOR, ".u-legend")] == [
        "step",
        "seconds",
    ]
    red = browser.execute_script("""
        return [...document.querySelectorAll("canvas")].map(canvas => {
          const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
          const isRed = at => data[at] > 150 && data[at + 1] < 100 && data[at + 3] > 128;
          return data.filter((_, at) => at % 4 == 0 && isRed(at)).length;
        })""")
    assert all(count > 20 for count in red)


def test_comparison_of_two_jobs(browser: Browser, show: Show) -> None:
    show(render_comparison_page(make_report("digits-1"), make_report("digits-2", 1.5)), "canvas")
    assert "hyperparameters" in browser.find_element(By.TAG_NAME, "table").text
    for scheme, width in VIEWS:
        resize(browser, scheme, width)
        check_view(browser, scheme, width)
        check_canvases(browser, 1 + len(METRICS), width)


def write_timelines(directory: Path) -> None:
    """Write the timelines of all ranks: each step computes 60 ms, with an all_reduce at its end."""
    for rank in range(RANKS):
        about = {"world_size": RANKS, "job": "algo-1:7592", "host": f"algo-{rank % 8 + 1}"}
        events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "args": about}]
        for step in range(STEPS):
            spans = [("step", f"step {step + 1}", 0, 80), ("compute", "forward", 0, 20), ("compute", "loss", 20, 25)]
            spans += [
                ("compute", "backward", 25, 70),
                ("communication", "all_reduce", 50, 70),
                ("wait", "all_reduce", 60, 70),
            ]
            events += [
                {
                    "ph": "X",
                    "cat": category,
                    "name": name,
                    "ts": 1000 * (80 * step + begin),
                    "dur": 1000 * (end - begin),
                }
                for category, name, begin, end in spans
            ]
        file = directory / f"smdataparallel_timeline_{rank}.json"
        file.write_text(json.dumps([{**event, "pid": rank} for event in events]))


def test_timeline(browser: Browser, show: Show, tmp_path: Path) -> None:
    write_timelines(tmp_path)
    analysis = analyse(trace.read_timeline(trace.find_files([tmp_path])))
    show(timeline_page.render_timeline_page(analysis), ".plot rect")
    for scheme, width in VIEWS:
        resize(browser, scheme, width)
        check_view(browser, scheme, width)
        bars = browser.execute_script("""
            return [...document.querySelectorAll(".plot")].map(plot => {
              scrollTo(0, plot.getBoundingClientRect().top + scrollY - 20);
              return ["forward", "backward", "communication", "wait"].map(kind => {
                const rect = plot.querySelector(`rect.${kind}`), box = rect.getBoundingClientRect();
                const top = document.elementFromPoint(box.left + box.width / 4, box.top + box.height / 2);
                return [rect === top, box.width > 5, getComputedStyle(rect).fill];
              });
            })""")
        assert len(bars) == 3
        assert all(end <= begin for axis in find_labels(browser) for (_, end), (begin, _) in itertools.pairwise(axis))
        for picture in bars:
            assert all(is_on_top and is_wide for is_on_top, is_wide, _ in picture)
            assert len({fill for *_, fill in picture}) == 4
    whole = read_axis(browser)
    plot = browser.find_element(By.CSS_SELECTOR, ".plot")
    browser.execute_script("arguments[0].scrollIntoView()", plot)
    select = ActionChains(browser, duration=0).move_to_element_with_offset(plot, -100, 0)
    select.click_and_hold().move_by_offset(100, 0).release().perform()
    wait_for(browser, lambda: read_axis(browser) != whole)
    ActionChains(browser, duration=0).double_click(plot).perform()
    wait_for(browser, lambda: read_axis(browser) == whole)


def read_axis(browser: Browser) -> list[str]:
    """Return the times below the first picture."""
    texts = "return [...document.querySelector('.axis').querySelectorAll('span')].map(span => span.textContent)"
    found: list[str] = browser.execute_script(texts)
    return found


def find_labels(browser: Browser) -> list[list[tuple[float, float]]]:
    """Return the left and right edges of the labels of each picture's axis."""
    found: list[list[tuple[float, float]]] = browser.execute_script("""
        return [...document.querySelectorAll(".axis")].map(axis => [...axis.querySelectorAll("span")]
          .map(span => span.getBoundingClientRect()).filter(box => box.width).map(box => [box.left, box.right]))
        """)
    return found
