"""The status page: one HTML file, no data in it, and headers that let it run nothing but its own script."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from fastapi import FastAPI, Response

_PARTS = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


def add_page(app: FastAPI) -> None:
    """Serves the page at ``/``. It reads the admin API with the token that its reader types in."""

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
    """(HTML, its Content-Security-Policy): script and style are allowed by their digests, everything else is not."""
    text = files("flexd.server").joinpath("status_page.html").read_text(encoding="utf-8")
    digests: dict[str, list[str]] = {"script": [], "style": []}
    for kind, body in _PARTS.findall(text):
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        digests[kind].append(f"'sha256-{digest}'")
    policy = (
        f"default-src 'none'; script-src {' '.join(digests['script'])}; style-src {' '.join(digests['style'])}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text, policy
