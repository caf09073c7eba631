"""What a run shows: the text in coloured tokens, how each came about, the histogram, and full depth beside it."""

from __future__ import annotations

import json
import re
import urllib.request
from typing import Any

import pytest

from tests.deploy.in_process import make_service
from tests.playground.site import Playground, serve, stream, token

NUM_LAYERS = 4


def ask(address: str, body: dict[str, Any]) -> dict[str, Any]:
    """What the service says to the same request, as one object."""
    path = "chat/completions" if "messages" in body else "completions"
    whole = {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/{path}", json.dumps(whole).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "plain"])
def test_the_tokens_on_the_page_join_to_the_text_of_the_service(
    playground: Playground, address: str, chat: bool
) -> None:
    playground.set(as_a_chat=chat, compare_with_full_depth=False)
    playground.run()
    [body] = playground.bodies
    answer = ask(address, body)
    choice = answer["choices"][0]
    assert playground.text("verified") == (choice["message"]["content"] if chat else choice["text"])
    assert playground.tokens("verified").count() == len(answer["tide"]["tokens"]) == 40


def test_a_token_has_the_colour_of_its_exit_layer(playground: Playground, address: str) -> None:
    playground.run()
    layers = [token["exit_layer"] for token in ask(address, playground.bodies[-1])["tide"]["tokens"]]
    tokens = playground.tokens("verified")
    colours = tokens.evaluate_all("all => all.map(one => getComputedStyle(one).backgroundColor)")
    by_layer = {layer: {colours[i] for i in range(40) if layers[i] == layer} for layer in set(layers)}
    assert set(by_layer) == {1, NUM_LAYERS}
    assert all(len(found) == 1 for found in by_layer.values())
    assert by_layer[1] != by_layer[NUM_LAYERS]
    bars = playground.box("verified").locator(".bar")
    solid = bars.evaluate_all("all => all.map(one => getComputedStyle(one).backgroundColor)")
    assert len(set(solid)) == len(solid) == 2


def test_pointing_at_a_token_shows_its_layer_score_and_audit(playground: Playground, address: str) -> None:
    playground.run()
    told = ask(address, playground.bodies[-1])["tide"]["tokens"]
    shown = [index for index, token in enumerate(told) if token["text"] and token["score"] is not None][:3]
    assert shown
    for index in shown:
        playground.tokens("verified").nth(index).hover()
        token = told[index]
        detail = f"layer {token['exit_layer']} of {NUM_LAYERS}, score {token['score']:.3f}, audit {token['audit']}"
        assert playground.detail("verified").endswith(detail)
        assert playground.tokens("verified").nth(index).get_attribute("title") == detail


def test_the_histogram_counts_every_token_once_at_its_layer(playground: Playground, address: str) -> None:
    playground.run()
    rows = playground.box("verified").locator(".bars li")
    counts = dict(re.fullmatch(r"(.+)\s(\d+) \(\d+ %\)", row.strip()).groups() for row in rows.all_inner_texts())
    assert sum(map(int, counts.values())) == playground.tokens("verified").count() == 40
    told = ask(address, playground.bodies[-1])["tide"]["tokens_per_layer"]
    assert counts == {"layer 1": str(told["1"]), "all 4": str(told["4"])}


def test_compare_with_full_depth_gives_two_times_their_ratio_and_the_same_text(playground: Playground) -> None:
    verdict = playground.run()
    told = re.fullmatch(r"([\d.]+)× as fast: verified ([\d.]+) s, full ([\d.]+) s, the same text", verdict)
    assert told, verdict
    ratio, chosen, full = map(float, told.groups())
    least, most = (full - 0.005) / (chosen + 0.005), (full + 0.005) / max(chosen - 0.005, 1e-9)
    assert least - 0.005 <= ratio <= most + 0.005, verdict
    assert playground.text("full") == playground.text("verified") != ""
    for mode, seconds in (("verified", chosen), ("full", full)):
        time = playground.box(mode).locator(".time").inner_text()
        assert re.fullmatch(rf"{seconds:.2f} s, [\d.]+ tokens/s", time)
    warm_up, first, second = playground.bodies
    assert (warm_up["max_tokens"], warm_up["tide"]["mode"]) == (1, "full"), "both runs find the prompt in the cache"
    assert [first["tide"]["mode"], second["tide"]["mode"]] == ["full", "verified"]
    assert {**first, "tide": None} == {**second, "tide": None}


def test_texts_that_part_are_called_so_and_marked_where_they_part(playground: Playground) -> None:
    answers = {"full": stream(token("one"), token(" two"), token(" three")), "fast": stream(token("one"), token(" 2"))}
    playground.answer(lambda body: answers[body["tide"]["mode"]])
    playground.set(Mode="fast")
    verdict = playground.run()
    assert re.fullmatch(r"[\d.]+× the tokens/s: fast .+ s, full .+ s, another text from token 2", verdict)
    for mode in ("full", "fast"):
        assert playground.box(mode).locator(".token.parted").get_attribute("data-index") == "1"


def test_a_token_that_full_depth_would_not_have_chosen_is_marked_and_told(playground: Playground) -> None:
    wrong = token(" wrong", exit_layer=1, score=0.5, audit="disagreed", mode="verified")
    playground.answer(lambda body: stream(token("right"), wrong))
    playground.set(Mode="fast", compare_with_full_depth=False)
    playground.run()
    marked = playground.box("fast").locator(".token.disagreed")
    assert marked.text_content() == " wrong"
    marked.hover()
    assert playground.detail("fast") == '" wrong": layer 1 of 4, score 0.500, audit disagreed, as verified'


def test_the_text_and_the_rate_grow_while_the_answer_comes(blank: Playground) -> None:
    """Without this a page that shows all at the end would pass."""
    watch = """box => { document.seen = []; new MutationObserver(() => {
        document.seen.push([box.querySelectorAll(".token").length, box.querySelector(".time")?.textContent]);
      }).observe(box, { childList: true, subtree: true }) }"""
    service = make_service(step_s=0.3)  # a busy browser still sees most tokens come alone
    with serve(service) as address:
        blank.visit(address)
        blank.set(compare_with_full_depth=False, Mode="full", Tokens="40")
        blank.page.locator("#runs").evaluate(watch)
        blank.run()
    service.engine.close()
    seen = blank.page.evaluate("document.seen")
    assert len({size for size, _ in seen}) >= 4
    times = {time for size, time in seen if 0 < size < 40}
    assert len([time for time in times if re.fullmatch(r"[\d.]+ s, [\d.]+ tokens/s", time)]) >= 3
