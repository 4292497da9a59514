"""`make pictures`: the dashboard while the demo's artifact is served under changing load.

Needs Chromium and its driver (`apt-get install chromium chromium-driver`) and `make demo`.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab.load import Phase, arrivals, bodies, offer
from lab.servers import Server, server
from t3c.artifact.reader import Artifact
from t3c.errors import DataError, T3CError
from t3c.runtime.reading import read_arrays

DEMO, DOCS = Path("out/demo"), Path("docs")
TOKEN = "a token for pictures alone"
SIZES = {"serve-dashboard": 1400, "serve-dashboard-narrow": 420}
ROWS = 8
PHASES = [
    Phase(seconds, rate)
    for seconds, rate in ((20, 30), (20, 80), (15, 160), (10, 400), (15, 160), (20, 80), (15, 30))
]
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage",
)  # fmt: skip


def main() -> int:
    artifact = DEMO / "digits.t3c"
    try:
        if not artifact.is_dir():
            raise DataError(f"{artifact}: no such artifact: make demo makes it")
        options = ["--threads", "1", "--objective-ms", "20"]
        with server(artifact, options, token=TOKEN) as one, _browser() as page:
            take(one, page, artifact)
    except T3CError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def take(one: Server, page: Any, artifact: Path) -> None:
    """Offer load for two minutes, use the page meanwhile, then take its picture."""
    page.get(f"{one.url}/#token={TOKEN}")
    load = threading.Thread(target=_offer, args=(one, artifact))
    load.start()
    time.sleep(sum(phase.seconds for phase in PHASES) - 30)
    _find(page, "#try-file").send_keys(str((DEMO / "digit.png").resolve()))
    _click(page, "input[name=limit][value=drift]")
    slider = _find(page, "#budget-slider")
    for _ in range(10):
        slider.send_keys("\ue012" * 6)  # the left arrow
        time.sleep(0.5)
    _click(page, "#try-run")
    time.sleep(10)
    for name, width in SIZES.items():
        page.set_window_size(width, 1000)
        time.sleep(1.5)
        height = page.execute_script("return document.documentElement.scrollHeight")
        page.set_window_size(width, height + 140)
        time.sleep(1.5)
        page.save_screenshot(str(DOCS / f"{name}.png"))
    load.join()


def _offer(one: Server, artifact: Path) -> None:
    test, model = read_arrays(DEMO / "test.npz"), Artifact(artifact).manifest.model
    requests = bodies(model.inputs[0].name, model.outputs[0].name, test["x"], test["y"], ROWS)
    asyncio.run(offer(one.infer, requests, arrivals(PHASES, seed=0)))


@contextmanager
def _browser() -> Iterator[Any]:
    from selenium import webdriver

    chromium, driver = (shutil.which(name) for name in ("chromium", "chromedriver"))
    if not (chromium and driver):
        raise DataError("no chromium or chromedriver: apt-get install chromium chromium-driver")
    with tempfile.TemporaryDirectory() as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = chromium
        for option in (*OPTIONS, f"--user-data-dir={profile}"):
            options.add_argument(option)
        page = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
        try:
            yield page
        finally:
            page.quit()


def _find(page: Any, selector: str) -> Any:
    return page.find_element("css selector", selector)


def _click(page: Any, selector: str) -> None:
    page.execute_script("arguments[0].click()", _find(page, selector))


if __name__ == "__main__":
    sys.exit(main())
