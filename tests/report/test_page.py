"""Does the page work in a real browser: is the time line drawn, does it zoom, does hovering show a transfer?"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.report import Report

webdriver = pytest.importorskip("selenium.webdriver")
pytestmark = [
    pytest.mark.skipif(
        shutil.which("chromedriver") is None or shutil.which("chromium") is None,
        reason="needs chromium and its driver: apt-get install chromium chromium-driver",
    ),
    pytest.mark.timeout(100),
]


@pytest.fixture
def browser() -> Iterator["webdriver.Chrome"]:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.add_argument("--window-size=1200,1000")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    try:
        yield driver
    finally:
        driver.quit()


@pytest.mark.emu("lazy")
def test_the_page_shows_the_step(report: Report, browser: "webdriver.Chrome", tmp_path: Path) -> None:
    page = tmp_path / "run.html"
    report.to_html(page)
    text = page.read_text()
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text
    browser.get(page.as_uri())

    find = browser.find_elements
    spans = report.record.spans
    assert len(find("css selector", "#timeline rect.span")) == len(spans)
    stalls = [span for span in spans if span.name == "stall"]
    assert len(find("css selector", "#timeline rect.stall")) == len(stalls) > 0
    assert len(find("css selector", "#stalls tbody tr")) == len(report.record.shown_stalls())
    assert len(find("css selector", "#memory path.curve")) == 2  # device and host
    assert len(find("css selector", "#memory line.budget.device")) == 1
    assert find("css selector", "#memory path.without.host")  # gradients apart
    assert "Stack" in browser.title
    assert "device 900 KiB" in browser.find_element("id", "title").text
    assert "efficiency" in browser.find_element("id", "text").text

    transfer = next(e for e in find("css selector", "#timeline rect.onload") if e.rect["width"] > 4)
    webdriver.ActionChains(browser).move_to_element(transfer).perform()
    tip = browser.find_element("id", "tip")
    assert tip.is_displayed()
    assert tip.text.startswith("onload of layers.")
    assert "GB/s" in tip.text

    width = transfer.rect["width"]
    origin = webdriver.common.actions.wheel_input.ScrollOrigin.from_element(transfer)
    webdriver.ActionChains(browser).scroll_from_origin(origin, 0, -300).perform()
    assert max(e.rect["width"] for e in find("css selector", "#timeline rect.onload")) > 1.1 * width
    browser.set_window_size(500, 1000)
    assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
    label = browser.find_element("css selector", "#memory svg text.tick")
    assert label.rect["height"] >= 10  # as large as on a wide page
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_the_page_shows_the_drive(disk_report: Report, browser: "webdriver.Chrome", tmp_path: Path) -> None:
    page = tmp_path / "run.html"
    disk_report.to_html(page)
    browser.get(page.as_uri())
    find = browser.find_elements
    for lane in ("fetch", "spill"):
        assert len(find("css selector", f"#timeline rect.{lane}")) == len(disk_report.record.of_lane(lane)) > 0
    assert len(find("css selector", "#memory path.curve")) == 3
    read = max(find("css selector", "#timeline rect.fetch"), key=lambda element: element.rect["width"])
    webdriver.ActionChains(browser).move_to_element(read).perform()
    assert browser.find_element("id", "tip").text.startswith("fetch of layers.")
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
