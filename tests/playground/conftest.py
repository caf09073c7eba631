"""One browser and one service for all tests of the page; a page of its own for each. Every test fails on a complaint of
the browser: an error, a warning, a breach of the page's policy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import BrowserContext

from deploy.service import Service
from tests.deploy.in_process import make_service
from tests.playground.site import Playground, find_chromium, open_browser, serve


@pytest.fixture(scope="package")
def browser() -> Iterator[BrowserContext]:
    executable = find_chromium()
    if executable is None:
        pytest.skip("no Chromium on this machine: make setup installs it as root, else set TIDE_CHROMIUM")
    with open_browser(executable) as browser:
        yield browser.new_context(viewport={"width": 1280, "height": 900})


@pytest.fixture(scope="package")
def service() -> Iterator[Service]:
    service = make_service()
    yield service
    service.engine.close()


@pytest.fixture(scope="package")
def address(service: Service) -> Iterator[str]:
    with serve(service) as address:
        yield address


@pytest.fixture
def blank(browser: BrowserContext) -> Iterator[Playground]:
    """A page that has not gone anywhere yet."""
    page = browser.new_page()
    playground = Playground(page)
    yield playground
    page.close()
    assert playground.complaints == []


@pytest.fixture
def playground(blank: Playground, address: str) -> Playground:
    blank.visit(address)
    blank.set(Prompt="hello there", Tokens="40")
    return blank
