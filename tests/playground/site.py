"""The playground on a loopback port, a Chromium to look at it with, and the page as a person sees it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, Request, Route, expect, sync_playwright
from starlette.applications import Starlette
from starlette.routing import Mount

from deploy.http_api.api import build_api
from deploy.service import Service

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_MS = 60_000
expect.set_options(timeout=PATIENCE_MS)


def find_chromium() -> str | None:
    """`TIDE_CHROMIUM`, or the one that the distribution installed."""
    named = [os.environ.get("TIDE_CHROMIUM"), *map(shutil.which, NAMES)]
    return next((path for path in named if path), None)


@contextlib.contextmanager
def open_browser(executable: str) -> Iterator[Browser]:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@contextlib.contextmanager
def serve(service: Service, prefix: str = "") -> Iterator[str]:
    """The address of the service's HTTP face, under a prefix where there are several. No Ray: the page knows none."""
    app = Starlette(routes=[Mount(prefix, build_api(service, playground=True))])
    config = uvicorn.Config(app, log_level="error", ws="none", lifespan="off")
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}{prefix}"
        finally:
            server.should_exit = True
            thread.join(timeout=60)
    assert not thread.is_alive(), "the server did not stop"


def token(text: str, **facts: Any) -> dict[str, Any]:
    """As the service tells of one."""
    plain = {"id": sum(text.encode()), "exit_layer": 4, "score": None, "audit": "verified", "mode": "full"}
    return {**plain, "text": text, **facts}


def stream(*tokens: dict[str, Any], error: str | None = None, done: bool = True) -> str:
    """A streamed answer: one event a token, the last with the sums."""
    sums = {"total_s": 1.0, "tokens_per_deep_pass": 1.0, "layers_per_token": 4.0}
    events: list[Any] = [{"choices": [{"finish_reason": None}], "tide": {"tokens": [each]}} for each in tokens]
    if error is not None:
        events.append({"error": {"message": error}})
    elif done:
        events.append({"choices": [{"finish_reason": "stop"}], "tide": {"tokens": [], **sums}})
    end = "data: [DONE]\n\n" if done and error is None else ""
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + end


@dataclass
class Playground:
    """One open page, what it asked for and what it complained about."""

    page: Page
    patience_ms: int = PATIENCE_MS
    """Until the end of a run must have come."""
    complaints: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """Of requests for text, in order."""
    addresses: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.set_default_timeout(PATIENCE_MS)
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._on_request)

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.type}: {message.text}")

    def _on_request(self, request: Request) -> None:
        self.addresses.append(request.url)
        if request.method == "POST":
            self.bodies.append(request.post_data_json)

    def visit(self, address: str) -> None:
        self.page.goto(f"{address}/playground")
        expect(self.page.locator("#about")).not_to_have_text("connecting…", timeout=PATIENCE_MS)

    def set(self, **controls: str | bool) -> None:
        """Set controls by the name a person reads: `Mode`, `Tokens`, or `as_a_chat` for a box."""
        for name, value in controls.items():
            control = self.control(name.replace("_", " "))
            if isinstance(value, bool):
                control.set_checked(value)
            elif control.evaluate("element => element.localName") == "select":
                control.select_option(value)
            else:
                control.fill(value)

    def answer(self, reply: Callable[[dict[str, Any]], str], status: int = 200) -> None:
        """Answer requests for text in the service's stead: what a service rarely or never says."""

        def fulfil(route: Route) -> None:
            route.fulfill(status=status, content_type="text/event-stream", body=reply(route.request.post_data_json))

        self.page.route("**/completions", fulfil)

    def control(self, name: str) -> Locator:
        return self.page.locator("form").get_by_label(name)

    def run(self) -> str:
        """Press Run and wait for the end; the verdict."""
        self.page.get_by_role("button", name="Run").click()
        return self.wait()

    def wait(self) -> str:
        expect(self.verdict).to_have_text(re.compile("text|tokens|not run"), timeout=self.patience_ms)
        expect(self.page.get_by_role("button", name="Run")).to_be_enabled(timeout=PATIENCE_MS)
        return self.verdict.inner_text()

    @property
    def verdict(self) -> Locator:
        return self.page.locator("#verdict")

    def box(self, mode: str) -> Locator:
        """The run of a mode."""
        return self.page.get_by_role("region", name=f"Run of mode {mode}")

    def text(self, mode: str) -> str:
        return self.box(mode).locator(".text").text_content() or ""

    def tokens(self, mode: str) -> Locator:
        return self.box(mode).locator(".token")

    def detail(self, mode: str) -> str:
        return self.box(mode).locator(".detail").inner_text()
