"""The pages of a service, the playground and the start page, and their security headers. The content security policy
allows only a page's own script and style, by digest, and forbids even its own script to turn text into markup (trusted
types)."""

from __future__ import annotations

import base64
import hashlib
import html
from pathlib import Path

FOLDER = Path(__file__).parent
LINKS = {
    "playground": "ask the model and see the exit layer of each token",
    "openapi.json": "the HTTP API as an OpenAPI document",
    "v1/models": "the model, its exits and modes",
    "health": "whether it serves",
    "version": "the version of TIDE Serve",
}
STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 40rem; margin: 3rem auto; padding: 0 1rem }
dt { font-family: ui-monospace, monospace; margin-top: .6rem } dd { margin: 0 }
"""
START_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>TIDE Serve</title><style>{style}</style></head><body>
<h1>TIDE Serve</h1>
<p>A language model with per-token early exit. OpenAI clients use <code>v1</code> under this address as their base
URL.</p>
<dl>{links}</dl>
<p>{docs}</p>
</body></html>
"""
DOCS_OF_PROJECT = (
    "The documentation is in the folder <code>docs</code> of the project; <code>make docs</code> builds the site."
)


def playground_page() -> tuple[str, dict[str, str]]:
    """The playground, with style and script inlined, and its headers."""
    text = (FOLDER / "playground.html").read_text(encoding="utf-8")
    style = (FOLDER / "playground.css").read_text(encoding="utf-8")
    script = (FOLDER / "playground.js").read_text(encoding="utf-8")
    text = text.replace("<style></style>", f"<style>{style}</style>")
    text = text.replace("<script></script>", f"<script>{script}</script>")
    script_policy = [f"script-src {_digest(script)}", "img-src data:", "connect-src 'self'"]
    return text, _headers(style, *script_policy, "require-trusted-types-for 'script'", "trusted-types 'none'")


def start_page(*, playground: bool, docs_url: str | None = None) -> tuple[str, dict[str, str]]:
    """Links to what a browser can show, relative to the address of the service, and to the documentation, if its
    address is known; and the headers of the page."""
    shown = {path: text for path, text in LINKS.items() if playground or path != "playground"}
    links = "".join(f'<dt><a href="{path}">{path}</a></dt><dd>{text}</dd>' for path, text in shown.items())
    docs = DOCS_OF_PROJECT if docs_url is None else f'<a href="{html.escape(docs_url)}">Documentation</a>'
    return START_PAGE.format(style=STYLE, links=links, docs=docs), _headers(STYLE)


def _headers(style: str, *more: str) -> dict[str, str]:
    policy = ["default-src 'none'", f"style-src {_digest(style)}", *more]
    policy += ["base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"]
    return {
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
