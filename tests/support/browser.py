"""Pages in headless Chromium, looked at from the inside: errors, sizes of charts, text that is cut, what a mouse does.

Each page has a frame of its own, because a window cannot be as narrow as a phone. A probe script goes first into its
copy of the page, before the content security policy, so the policy binds the page and not the probe. The probe's
findings become an attribute of the outer page, which --dump-dom prints. Nothing is ever fetched.
"""

from __future__ import annotations

import html
import json
import shutil
import subprocess
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=120000"),
)
SCHEMES = {"dark": "0", "light": "1"}  # as Blink numbers them

FRAME = '<iframe name="{name}" width="{width}" height="900" frameborder="0" {mouse} srcdoc="{page}"></iframe>'
PROBE = (Path(__file__).parent / "probe.js").read_text()

Seen = dict[str, Any]


def look(pages: Mapping[str, tuple[str, int]], folder: Path, scheme: str, mouse: bool = False) -> dict[str, Seen]:
    """What the probe found in each of the ``pages``, {name: (page, width)}, with light or dark preferred, and also what
    a mouse did there, which takes most of the time."""
    assert CHROMIUM is not None, "chromium is not installed: apt-get install chromium"
    frames = [
        FRAME.format(
            name=name,
            width=width,
            mouse='data-mouse="yes"' if mouse else "",
            page=html.escape(page.replace("<head>", f"<head><script>{PROBE}</script>", 1)),
        )
        for name, (page, width) in pages.items()
    ]
    path = folder / f"{scheme}.html"
    # without it Chromium guesses the charset, sometimes wrongly
    head = '<!doctype html><html><head><meta charset="utf-8"></head>'
    path.write_text(f"{head}<body>{''.join(frames)}", encoding="utf-8")
    done = subprocess.run(
        [
            *(CHROMIUM, *FLAGS, f"--user-data-dir={folder / scheme}", "--window-size=1400,900"),
            *(f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", "--dump-dom", path.as_uri()),
        ],
        capture_output=True,
        encoding="utf-8",
        timeout=280,
    )
    root = _Root()
    root.feed(done.stdout)
    seen = {name: json.loads(root.attributes.get(f"data-{name}") or "null") for name in pages}
    assert all(seen.values()), f"not all pages were shown: {done.stderr[-2000:]}"
    return seen


class _Root(HTMLParser):
    """Reads the attributes of the outer <html>, which comes first."""

    attributes: Mapping[str, str | None] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "html" and not self.attributes:
            self.attributes = dict(attrs)
