"""Everything without a mouse, and names for those who do not see the page."""

from __future__ import annotations

import re

from playwright.sync_api import Locator, expect

from tests.deploy.in_process import make_service
from tests.playground.site import Playground, serve

WALK = ["prompt", "mode", "threshold", "tokens", "temperature", "go", "chat", "compare"]


def focused(playground: Playground) -> Locator:
    return playground.page.locator(":focus")


def test_a_run_from_the_first_tab_to_the_first_token(blank: Playground, address: str) -> None:
    playground, page, press = blank, blank.page, blank.page.keyboard.press
    playground.visit(address)
    for name in WALK:
        press("Tab")
        expect(focused(playground)).to_have_id(name)
    for _ in range(len(WALK) - 2):
        press("Shift+Tab")
    expect(focused(playground)).to_have_id("mode")
    press("ArrowDown")
    press("ArrowDown")
    assert playground.control("Mode").input_value() == "fast"
    press("Tab")
    press("ArrowRight")
    expect(page.locator("#thresholdLabel")).to_contain_text("Threshold: 0.00")
    press("Control+Enter")
    assert "fast" in playground.wait()
    expect(focused(playground)).to_have_id("threshold")
    for _ in range(len(WALK) - 3):
        press("Tab")
    expect(focused(playground)).to_have_id("compare")
    press("Tab")
    assert playground.detail("full").startswith('"'), "the first token of the first run"
    press("Tab")
    expect(focused(playground)).to_have_attribute("data-index", "0")
    assert playground.detail("fast").startswith('"'), "one stop for each run"


def test_arrow_keys_move_among_the_tokens_and_tab_comes_back_to_the_same_one(playground: Playground) -> None:
    press = playground.page.keyboard.press
    playground.run()
    first = playground.tokens("verified").first
    first.focus()
    for key, index in (("ArrowRight", 1), ("ArrowDown", 2), ("ArrowLeft", 1), ("End", 39), ("ArrowRight", 39)):
        press(key)
        expect(focused(playground)).to_have_attribute("data-index", str(index))
        told = playground.tokens("verified").nth(index).get_attribute("title")
        assert playground.detail("verified").endswith(str(told))
        assert re.fullmatch(r"layer [14] of 4, score (none|\d\.\d{3}), audit verified.*", str(told))
    for key in ("Home", "ArrowUp", "ArrowRight"):
        press(key)
    expect(playground.box("verified").locator(".token[tabindex='0']")).to_have_count(1)
    press("Shift+Tab")
    press("Tab")
    expect(focused(playground)).to_have_attribute("data-index", "1")


def test_the_focus_goes_from_run_to_stop_and_back(blank: Playground) -> None:
    service = make_service(step_s=0.2)  # 200 tokens take longer than the browser to look where the focus is
    page = blank.page
    with serve(service) as address:
        blank.visit(address)
        blank.set(compare_with_full_depth=False, Mode="full", Tokens="200")
        page.get_by_role("button", name="Run").focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("button", name="Stop")).to_be_focused()
        page.keyboard.press("Enter")
        blank.wait()
        expect(page.get_by_role("button", name="Run")).to_be_focused()
    service.engine.close()


def test_every_control_has_a_name_and_the_verdict_is_read_out(playground: Playground) -> None:
    page = playground.page
    for control in page.locator("input, select, textarea").all():
        assert control.evaluate("one => one.labels.length === 1 && one.labels[0].innerText.trim() !== ''") or (
            control.is_hidden()
        )
    unnamed = "all => all.filter(one => !one.labels?.length && !one.textContent.trim()).length"
    assert page.locator("input, select, textarea, button").evaluate_all(unnamed) == 0
    expect(playground.verdict).to_have_attribute("aria-live", "polite")
    expect(playground.control("Threshold")).to_have_attribute("aria-valuetext", "calibrated")
    expect(playground.control("Mode")).to_have_accessible_description(re.compile("full depth verifies each"))
    playground.run()
    expect(playground.box("full").get_by_role("group", name="Answer")).to_have_attribute("aria-busy", "false")
    expect(playground.box("full").get_by_role("list", name="Tokens by exit layer")).to_be_visible()
