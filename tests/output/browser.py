"""A headless Chromium, driven over the WebDriver protocol."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
CHROMEDRIVER = shutil.which("chromedriver")
# No sandbox: the tests may run as root, where Chromium has none. No network: no host is found.
ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1400,1000",
             "--host-resolver-rules=MAP * ~NOTFOUND")  # fmt: skip


class Browser:
    """A window."""

    def __init__(self, url: str, downloads: Path) -> None:
        options = {
            "binary": CHROMIUM,
            "args": list(ARGUMENTS),
            "prefs": {"download.default_directory": str(downloads)},
        }
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._downloads, self._session = downloads, url
        session = self._request("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"{url}/session/{session['sessionId']}"

    def _request(self, method: str, path: str, body: object = None) -> Any:
        data = None if method == "GET" else json.dumps(body or {}).encode()
        sent = urllib.request.Request(self._session + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(sent, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(error.read().decode()) from error

    def open(self, page: Path) -> None:
        """Open a page and wait until it is loaded."""
        self._request("POST", "/url", {"url": page.as_uri()})

    def run(self, script: str, *arguments: object) -> Any:
        """Run a script with `arguments` and return its value."""
        return self._request("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def click(self, selector: str) -> None:
        """Click as a user would: hidden or covered elements cannot be clicked."""
        found = self._request("POST", "/element", {"using": "css selector", "value": selector})
        self._request("POST", f"/element/{next(iter(found.values()))}/click")

    def log(self) -> list[str]:
        """Return the messages of the console since the last call."""
        return [entry["message"] for entry in self._request("POST", "/se/log", {"type": "browser"})]

    def has_dialog(self) -> bool:
        """Return whether a script shows an alert."""
        try:
            self._request("GET", "/alert/text")
        except RuntimeError:
            return False
        return True

    def downloaded(self, name: str) -> str:
        """Return the text of a file once it is there."""
        for _ in range(100):
            if (file := self._downloads / name).is_file():
                return file.read_bytes().decode()
            time.sleep(0.1)
        raise AssertionError(f"{name} was not downloaded")

    def close(self) -> None:
        """Close the window."""
        self._request("DELETE", "")


@contextmanager
def chromium(downloads: Path) -> Iterator[Browser]:
    """Yield a window that saves files to a folder."""
    assert CHROMEDRIVER is not None
    driver = subprocess.Popen([CHROMEDRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert driver.stdout is not None
        port = next(line.split("port ")[1].strip(". \n") for line in driver.stdout if "started successfully" in line)
        browser = Browser(f"http://127.0.0.1:{port}", downloads)
        try:
            yield browser
        finally:
            browser.close()
    finally:
        driver.terminate()
        driver.wait(timeout=30)
