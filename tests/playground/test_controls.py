"""What the controls send, and how a run is stopped, fails, or wants a key."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import pytest
from playwright.sync_api import expect

from deploy.config.policy import LivePolicy
from deploy.keys import Caller, KeyRing
from deploy.service import Service
from tests.deploy.in_process import make_service
from tests.playground.site import Playground, serve, stream, token

KEY = "the-key-of-this-test"


def until_idle(service: Service) -> None:
    deadline = time.monotonic() + 60
    while service.num_open or service.engine.stats().blocks_owned:
        assert time.monotonic() < deadline, f"{service.num_open} requests are still open"
        time.sleep(0.01)


CHOICES: list[tuple[dict[str, str], dict[str, Any]]] = [
    ({"Mode": "full"}, {"mode": "full"}),
    ({"Mode": "verified"}, {"mode": "verified"}),
    ({"Mode": "verified", "Threshold": "0.5"}, {"mode": "verified", "threshold": 0.5}),
    ({"Mode": "fast", "Threshold": "1.05"}, {"mode": "fast", "threshold": 1.05}),
    ({"Mode": "fast", "Threshold": "0"}, {"mode": "fast", "threshold": 0}),
    (
        {"Mode": "bounded", "Threshold": "-0.05", "May differ": "0.1"},
        {"mode": "bounded", "epsilon": 0.1, "margin": 0.2},
    ),
]


def test_mode_bound_and_threshold_are_in_the_request_only_where_they_apply(playground: Playground) -> None:
    playground.set(compare_with_full_depth=False, Tokens="4")
    for controls, expected in CHOICES:
        playground.set(**controls)
        playground.run()
        assert playground.bodies[-1]["tide"] == {"tokens": True, **expected}
    playground.set(Tokens="3", Temperature="0.7")
    playground.run()
    body = playground.bodies[-1]
    assert (body["max_tokens"], body["temperature"]) == (3, 0.7)


def test_controls_that_do_not_apply_to_a_mode_are_not_shown(playground: Playground) -> None:
    shown = {"full": (False, False), "verified": (True, False), "bounded": (True, True), "fast": (True, False)}
    for mode, (threshold, bound) in shown.items():
        playground.set(Mode=mode)
        assert playground.control("Threshold").is_visible() is threshold
        assert playground.control("May differ").is_visible() is bound
        assert playground.control("API key").is_visible() is False


def test_modes_that_the_policy_closes_are_not_offered(blank: Playground) -> None:
    service = make_service(policy=LivePolicy(modes=["verified", "fast"]))
    with serve(service) as address:
        blank.visit(address)
        assert blank.control("Mode").locator("option").all_inner_texts() == ["verified", "fast"]
        blank.set(Tokens="4")
        blank.run()
        assert [body["tide"]["mode"] for body in blank.bodies] == ["verified"], "no full depth to put beside it"
    service.engine.close()


@pytest.mark.parametrize("how", ["button", "Escape", "closing the page"])
def test_stop_ends_the_request_in_the_service(blank: Playground, how: str) -> None:
    service = make_service(step_s=0.2)  # 200 tokens take longer than any click
    page = blank.page
    with serve(service) as address:
        blank.visit(address)
        blank.set(Tokens="200", Mode="full")
        page.get_by_role("button", name="Run").click()
        expect(blank.tokens("full").nth(2)).to_be_attached()
        assert service.num_open == 1
        if how == "button":
            page.get_by_role("button", name="Stop").click()
        elif how == "Escape":
            page.keyboard.press("Escape")
        else:
            page.close()
        until_idle(service)
        if not page.is_closed():
            assert blank.wait().startswith("stopped after ")
            assert 2 < blank.tokens("full").count() < 200, "what came is kept"
            expect(page.get_by_role("alert")).to_have_count(0)
    service.engine.close()


def test_a_stopped_comparison_does_not_begin_its_second_run(blank: Playground) -> None:
    service = make_service(step_s=0.2)  # as above
    with serve(service) as address:
        blank.visit(address)
        blank.set(Tokens="200")
        blank.page.get_by_role("button", name="Run").click()
        expect(blank.tokens("full").nth(1)).to_be_attached()
        blank.page.get_by_role("button", name="Stop").click()
        blank.wait()
        until_idle(service)
        assert [body["tide"]["mode"] for body in blank.bodies] == ["full", "full"], "the warm-up and the first run"
    service.engine.close()


def test_the_key_field_appears_when_a_key_is_wanted_and_opens_the_door(blank: Playground) -> None:
    service = make_service(keys=KeyRing({hashlib.sha256(KEY.encode()).digest(): Caller("team-a")}))
    page = blank.page
    with serve(service) as address:
        blank.visit(address)
        key = page.get_by_label("API key")
        expect(key).to_be_focused()
        page.keyboard.type("not the key")
        page.keyboard.press("Enter")
        expect(page.locator("#about")).to_have_text("the API key is not known")
        assert blank.wait() == "not run"
        blank.set(API_key=KEY, Tokens="4")
        expect(page.locator("#about")).to_have_text("tiny, 4 layers, exits after 1")
        assert blank.run().endswith("the same text")
        assert blank.text("full") == blank.text("verified") != ""
    service.engine.close()
    refused = [complaint for complaint in blank.complaints if "401" in complaint]
    assert refused == blank.complaints != [], "the browser itself reports every 401"
    blank.complaints.clear()


FAILURES = [
    (200, stream(token("half"), done=False), "the answer broke off"),
    (200, stream(token("half"), error="internal error 12ab"), "internal error 12ab"),
    (429, '{"error": {"message": "too many requests are waiting"}}', "too many requests are waiting"),
    (502, "<html>Bad Gateway</html>", "the server answered with status 502"),
]


def test_a_failed_run_says_why_and_the_next_one_works(playground: Playground) -> None:
    playground.set(compare_with_full_depth=False, Tokens="4")
    for status, reply, said in FAILURES:
        playground.answer(lambda body, reply=reply: reply, status=status)
        assert playground.run().startswith("failed after ")
        expect(playground.page.get_by_role("alert")).to_have_text(said)
        playground.page.unroute_all()
    assert playground.run().startswith("4 tokens in ")
    expect(playground.page.get_by_role("alert")).to_have_count(0)
    told = [each for each in playground.complaints if "status of 429" in each or "status of 502" in each]
    assert told == playground.complaints, "the browser itself reports those"
    playground.complaints.clear()


def test_an_empty_prompt_is_not_sent(playground: Playground) -> None:
    playground.set(Prompt="")
    playground.page.get_by_role("button", name="Run").click()
    assert playground.page.get_by_label("Prompt").evaluate("one => one.matches(':invalid')")
    assert playground.bodies == []
