"""How soon a browser shows the pages of `headstart serve`, and what they weigh.

    python benchmarks/page.py --times 15

The default model's server and a headless Chromium on this machine; each load has a fresh profile, so nothing is cached.
From the request on, by Chromium's own clock: the first paint with content, and when the playground's box for messages
(the dashboard's first tile) is there. Bytes are those of all answers, unpacked, and as they were sent.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from engines.process import served

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
PAGES = {"/": "textarea", "/dashboard": ".tile"}
"""And what shows that the page's program has run."""
FOUND = """(what) => {
  const look = () => {
    if (document.querySelector(what)) globalThis.usable = performance.now();
    else requestAnimationFrame(look);
  };
  addEventListener("DOMContentLoaded", look);
}"""
TOLD = """() => {
  const entries = [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")]
    .filter((each) => !each.name.includes("/v1/") && !each.name.includes("/metrics"));
  const sum = (name) => entries.reduce((total, each) => total + each[name], 0);
  const [paint] = performance.getEntriesByName("first-contentful-paint");
  return paint && globalThis.usable && { paint: paint.startTime, usable, files: entries.length,
    bytes: sum("decodedBodySize"), sent: sum("transferSize") };
}"""


def load(browser: Any, url: str, path: str) -> dict[str, float]:
    """One page in a fresh profile."""
    context = browser.new_context(base_url=url, viewport={"width": 1280, "height": 800})
    context.add_init_script(f"({FOUND})({json.dumps(PAGES[path])})")
    page = context.new_page()
    page.goto(path)
    told: dict[str, float] = page.wait_for_function(TOLD).json_value()
    context.close()
    return told


def row(path: str, loads: list[dict[str, float]]) -> str:
    def middle(name: str) -> str:
        low, median, high = statistics.quantiles([each[name] for each in loads], n=4)
        return f"{median:.0f} ({low:.0f} to {high:.0f})"

    last = loads[-1]
    sizes = f"{last['bytes'] / 1000:.0f} | {last['sent'] / 1000:.0f} | {last['files']}"
    return f"| `{path}` | {middle('paint')} | {middle('usable')} | {sizes} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=15)
    parser.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("google-chrome"))
    parser.add_argument("--out", type=Path, help="JSON with every load")
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    command = [sys.executable, "-m", "headstart", "serve", "--port", "{port}"]
    record: dict[str, list[dict[str, float]]] = {}
    print("| page | first paint, ms | usable, ms | kB | kB sent | files |\n|---|---|---|---|---|---|")
    with (
        tempfile.TemporaryDirectory(prefix="page-") as folder,
        served("headstart", [command], Path(folder) / "log", {}, 120) as (url,),
        sync_playwright() as driver,
    ):
        browser = driver.chromium.launch(executable_path=options.chromium, args=FLAGS)
        load(browser, url, "/")  # the browser's own first steps
        for path in PAGES:
            record[path] = [load(browser, url, path) for _ in range(options.times)]
            print(row(path, record[path]), flush=True)
        browser.close()
    if options.out:
        options.out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
