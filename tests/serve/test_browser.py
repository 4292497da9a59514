"""The dashboard in a real browser."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from conftest import Made
from serving import SOON, TOKEN, Running, running
from t3c.serve.config import ServeConfig

CHROMIUM, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER),
    reason="Chromium and its driver are not installed: apt-get install chromium chromium-driver",
)
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--window-size=1400,1700",
)  # fmt: skip


@pytest.fixture(scope="module")
def board(made: Made) -> Iterator[Running]:
    with running(made.artifact, ServeConfig(objective_ms=10_000, batch=1, shadow=1.0)) as found:
        yield found


@pytest.fixture
def browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    monkeypatch.setenv("SE_OFFLINE", "true")
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for option in (*OPTIONS, f"--user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=DRIVER)
    found = webdriver.Chrome(options=options, service=service)
    try:
        yield found
    finally:
        found.quit()


def until(condition: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + SOON
    while not (found := condition()):
        assert time.monotonic() < end, what
        time.sleep(0.05)
    return found


def text(browser: Any, selector: str) -> str:
    return str(browser.find_element("css selector", selector).text)


def choose(browser: Any, limit: str) -> None:
    """The radio button of what is limited, by its label as a person would."""
    button = browser.find_element("css selector", f"input[name=limit][value={limit}]")
    browser.execute_script("arguments[0].click()", button)


def slide(browser: Any, keys: str) -> None:
    browser.find_element("css selector", "#budget-slider").send_keys(keys)


def infer(board: Running, made: Made) -> str:
    x = made.digits.test[0][:1].numpy()
    tensor = {"name": "input", "shape": list(x.shape), "datatype": "FP32", "data": x.tolist()}
    at = f"/v2/models/{board.service.version.model.name}/infer"
    return str(board.call("POST", at, {"inputs": [tensor]})[1]["parameters"]["profile"])


def errors(browser: Any) -> list[str]:
    return [e["message"] for e in browser.get_log("browser") if e["level"] == "SEVERE"]


def test_the_slider_moves_the_profile_that_serves(board: Running, browser: Any, made: Made) -> None:
    from selenium.webdriver.common.keys import Keys

    names = [candidate.profile for candidate in board.service.version.runtime.candidates]
    browser.get(f"{board.url}/#token={TOKEN}")
    until(lambda: text(browser, "#active-profile") == names[-1], "the largest serves")
    assert "token" not in browser.current_url
    choose(browser, "size")
    slide(browser, Keys.HOME)
    until(lambda: text(browser, "#chosen-profile") == names[0], "the smallest is chosen")
    until(lambda: board.get("/v1/budget")["profile"] == names[0], "the server was told")
    until(lambda: text(browser, "#active-profile") == names[0], "and the page shows what serves")
    assert infer(board, made) == names[0]
    assert "within" in text(browser, "#guarantee")
    seen = [names[0]]
    for _ in range(200):  # by keyboard through the whole range
        slide(browser, Keys.ARROW_RIGHT * 5)
        name = until(lambda: text(browser, "#chosen-profile"), "a profile is named")
        seen += [name] if name != seen[-1] else []
        if name == names[-1]:
            break
    assert [name for name in names if name in seen] == seen  # more budget is never less
    until(lambda: infer(board, made) == names[-1], "the largest serves again")
    choose(browser, "none")
    until(lambda: board.get("/v1/budget")["budget"]["size_mb"] is None, "no limit again")
    until(lambda: "budget" in text(browser, "#events"), "it is among the events")
    assert errors(browser) == []


def test_without_a_token_the_slider_only_tells(board: Running, browser: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    names = [candidate.profile for candidate in board.service.version.runtime.candidates]
    browser.get(board.url)
    until(lambda: text(browser, "#active-profile") == names[-1], "the largest serves")
    choose(browser, "size")
    slide(browser, Keys.HOME)
    until(lambda: text(browser, "#chosen-profile") == names[0], "the smallest would serve")
    time.sleep(0.5)
    assert board.get("/v1/budget")["profile"] == names[-1]
    assert errors(browser) == []


def test_a_picture_is_tried_with_the_sliders_budget(
    board: Running, browser: Any, made: Made, tmp_path: Path
) -> None:
    from selenium.webdriver.common.keys import Keys

    pixels = (made.digits.test[0][0, 0].numpy() * 0.5 + 0.5).clip(0, 1) * 255
    file = tmp_path / "digit.png"
    Image.fromarray(pixels.astype(np.uint8)).save(file)
    browser.get(board.url)
    until(lambda: text(browser, "#active-profile"), "the page is there")
    choose(browser, "size")
    slide(browser, Keys.HOME)
    browser.find_element("css selector", "#try-file").send_keys(str(file))
    run = browser.find_element("css selector", "#try-run")
    browser.execute_script("arguments[0].click()", run)
    answer = until(lambda: text(browser, "#try-answer"), "there is an answer")
    until(lambda: "tiny" in text(browser, "#try-answer"), answer)
    classes = board.service.version.model.classes
    assert classes
    assert any(name in answer for name in classes)
    assert errors(browser) == []


def test_it_is_usable_by_keyboard_and_screen_reader(board: Running, browser: Any) -> None:
    browser.get(board.url)
    until(lambda: text(browser, "#active-profile"), "the page is there")
    unnamed = browser.execute_script(
        """return [...document.querySelectorAll('input, button, textarea, select')]
             .filter(e => e.offsetParent !== null && !(e.labels?.length || e.ariaLabel
               || e.getAttribute('aria-labelledby') || e.textContent.trim()))
             .map(e => e.outerHTML)"""
    )
    assert unnamed == []
    levels = browser.execute_script(
        "return [...document.querySelectorAll('h1, h2, h3')].map(e => +e.tagName[1])"
    )
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))
    charts = browser.execute_script(
        "return [...document.querySelectorAll('svg[role=img]')].map(e => e.ariaLabel)"
    )
    assert charts
    assert all(charts)
    assert browser.find_elements("css selector", "[aria-live=polite]")
    assert browser.find_elements("css selector", "main")
    choose(browser, "size")  # without a limit there is nothing to slide
    reached = set()
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    for _ in range(40):
        ActionChains(browser).send_keys(Keys.TAB).perform()
        reached.add(browser.switch_to.active_element.get_attribute("id"))
    assert {"budget-slider", "token"} <= reached
