"""The playground as one page, and its security headers. The content security policy allows only its own script and
style, by digest, and forbids even its own script to turn text into markup (trusted types)."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

FOLDER = Path(__file__).parent


def load_page() -> tuple[str, dict[str, str]]:
    """The page, with style and script inlined, and its headers."""
    html = (FOLDER / "playground.html").read_text(encoding="utf-8")
    style = (FOLDER / "playground.css").read_text(encoding="utf-8")
    script = (FOLDER / "playground.js").read_text(encoding="utf-8")
    html = html.replace("<style></style>", f"<style>{style}</style>")
    html = html.replace("<script></script>", f"<script>{script}</script>")
    policy = [
        "default-src 'none'",
        f"script-src {_digest(script)}",
        f"style-src {_digest(style)}",
        "img-src data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
    return html, {
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
