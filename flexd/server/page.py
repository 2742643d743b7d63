"""The status page: one HTML file without data, and headers that allow no script but its own.

Charts are drawn by uPlot (MIT, github.com/leeoniya/uPlot), whose files in ``vendor/uplot`` are inlined.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from fastapi import FastAPI, Response

INLINED = ("uPlot.iife.min.js", "uPlot.min.css")
"""Files of ``vendor/uplot``; each replaces the comment of its name in the page."""
_PARTS = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


def add_page(app: FastAPI) -> None:
    """Serve the page at ``/``. It reads the admin API with the token that the user types in."""

    @app.get("/", include_in_schema=False)
    def page() -> Response:
        text, policy = _page()
        headers = {
            "content-security-policy": policy,
            "cache-control": "no-store",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
            "x-frame-options": "DENY",
            "cross-origin-opener-policy": "same-origin",
            "cross-origin-resource-policy": "same-origin",
        }
        return Response(text, media_type="text/html", headers=headers)


@cache
def _page() -> tuple[str, str]:
    """Return the HTML and its Content-Security-Policy: scripts and styles by their digests, nothing else."""
    folder = files("flexd.server")
    text = folder.joinpath("status_page.html").read_text(encoding="utf-8")
    for name in INLINED:
        vendored = folder.joinpath("vendor", "uplot", name).read_text(encoding="utf-8")
        text = text.replace(f"/* {name} */", vendored.strip())
    digests: dict[str, list[str]] = {"script": [], "style": []}
    for kind, body in _PARTS.findall(text):
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        digests[kind].append(f"'sha256-{digest}'")
    policy = (
        f"default-src 'none'; script-src {' '.join(digests['script'])}; style-src {' '.join(digests['style'])}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text, policy
