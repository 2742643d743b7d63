"""Pictures of the status page, light and dark, of a real daemon beside ``flexd demo``: docs/images/status-*.png.

Usage: tools/shoot_status_page.py [--samples 10] [--out docs/images]
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import yaml
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]
CHROMIUM = ROOT / ".ops-tools" / "bin" / "chromium"
STEPS = 600
"""The demo plans first after a tenth of them, and is ended when the pictures are taken."""
START_SECONDS = 400.0
SAMPLE_SECONDS = 5.0
END_SECONDS = 30.0
WIDTH, HEIGHT = 1280, 820


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=10, help="of 5 s each that the page shall show")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    options = parser.parse_args()
    if not CHROMIUM.exists():
        print(f"{CHROMIUM} is not here: make ops-tools", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="flexd-page-") as folder:
        demo = subprocess.Popen(
            [sys.executable, "-m", "flexd", "demo", "--link-mbit", "0", "--steps", str(STEPS), "--out", folder],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            address = _address(Path(folder), demo)
            _wait_for_traffic(address, options.samples, demo)
            shoot(address, options.out)
        finally:
            demo.send_signal(signal.SIGINT)
            try:
                demo.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(demo.pid, signal.SIGKILL)
    return 0


def shoot(address: str, folder: Path) -> None:
    """``status-light.png`` and ``status-dark.png`` of the page at ``address`` into ``folder``."""
    with sync_playwright() as playwright:
        # Containers have no user namespaces for its sandbox; nothing but our own page is shown.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=60_000)
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme)
            page.goto(address)
            page.wait_for_selector("body[data-polls]")
            target = folder / f"status-{scheme}.png"
            page.screenshot(path=target, full_page=True)
            print(target)
        browser.close()


def _address(folder: Path, demo: subprocess.Popen[bytes]) -> str:
    config = folder / "flexd.yaml"
    _until(config.exists, START_SECONDS, demo, "the demo has not written its configuration")
    return f"http://127.0.0.1:{yaml.safe_load(config.read_text())['server']['port']}"


def _wait_for_traffic(address: str, samples: int, demo: subprocess.Popen[bytes]) -> None:
    def enough() -> bool:
        try:
            timeline: dict[str, Any] = httpx.get(f"{address}/v1/timeline", timeout=5.0).raise_for_status().json()
        except httpx.HTTPError:
            return False
        return sum(sample["steps"] > 0 for sample in timeline["samples"]) >= samples and bool(timeline["plans"])

    _until(enough, START_SECONDS + 2 * samples * SAMPLE_SECONDS, demo, "the ranks have not reported enough")


def _until(reached: Callable[[], bool], seconds: float, demo: subprocess.Popen[bytes], problem: str) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        if demo.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"{problem}; the demo {'runs' if demo.poll() is None else 'has ended'}")
        time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main())
