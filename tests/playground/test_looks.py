"""Both colour schemes and a telephone: readable, nothing to scroll sideways. One picture is kept."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Route

from tests.playground.site import Playground, stream, token

PICTURE = Path(__file__).parents[2] / "build" / "playground.png"
WIDTHS = (360, 768, 1280)
LEAST_CONTRAST = 4.5
"""AA of WCAG 2, for text of ordinary size."""

CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const over = (...layers) => {
    for (const layer of layers) { canvas.fillStyle = layer; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (rgb) => rgb.map((c) => c / 255).map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  const behind = (one) => one ? [...behind(one.parentElement), getComputedStyle(one).backgroundColor] : ["white"];
  const said = [];
  for (const one of document.querySelectorAll("body *:not(script):not(template):not(:disabled)")) {
    const own = [...one.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.textContent.trim());
    if (!(own || "value" in one || one.matches(".token")) || !one.checkVisibility()) continue;
    const ground = behind(one), ink = getComputedStyle(one).color;
    said.push([one.id || one.className || one.localName, ratio(light(over(...ground)), light(over(...ground, ink)))]);
  }
  for (const bar of document.querySelectorAll(".bar")) {
    const ground = behind(bar.parentElement), paint = getComputedStyle(bar).backgroundColor;
    /* A bar is no text: 3 is enough. */
    said.push(["bar", 1.5 * ratio(light(over(...ground)), light(over(...ground, paint)))]);
  }
  return said;
}"""


def with_exits_after(playground: Playground, layers: list[int]) -> None:
    """Open the page again, on a model with other exits."""

    def change(route: Route) -> None:
        answer = route.fetch()
        listed = answer.json()
        listed["data"][0]["tide"]["checkpoint_layers"] = layers
        route.fulfill(response=answer, json=listed)

    playground.page.route("**/v1/models", change)
    playground.visit(playground.page.url.removesuffix("/playground"))


def test_both_schemes_have_the_contrast_of_aa_and_a_text_that_stands_follows_the_system(playground: Playground) -> None:
    looks = "one => [getComputedStyle(document.body).backgroundColor, getComputedStyle(one).backgroundColor]"
    paints = "all => new Set(all.map(one => getComputedStyle(one).backgroundColor)).size"
    with_exits_after(playground, [1, 2, 3])
    playground.answer(lambda body: stream(*(token(f" {layer}", exit_layer=layer) for layer in (1, 2, 3, 4))))
    playground.run()
    playground.tokens("verified").first.focus()
    seen = []
    for scheme in ("light", "dark"):
        playground.page.emulate_media(color_scheme=scheme)
        assert playground.tokens("verified").evaluate_all(paints) == 4, "a colour for each exit layer"
        measured = playground.page.evaluate(CONTRAST)
        assert {"token early", "token", "bar", "about", "hint", "detail", "go"} <= {name for name, _ in measured}
        assert [each for each in measured if each[1] < LEAST_CONTRAST] == []
        seen.append(playground.box("verified").locator(".token.early").first.evaluate(looks))
    (light_ground, light_token), (dark_ground, dark_token) = seen
    assert light_ground != dark_ground
    assert light_token != dark_token


def test_nothing_has_to_be_scrolled_sideways(playground: Playground) -> None:
    page = playground.page
    page.emulate_media(color_scheme="dark")
    playground.set(Prompt="a long word " + "o" * 100)
    playground.run()
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 740})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        cut = "all => all.filter(one => one.getBoundingClientRect().right > innerWidth).map(one => one.outerHTML)"
        assert page.locator("body *").evaluate_all(cut) == []
        columns = page.locator(".run").evaluate_all("all => new Set(all.map(one => one.offsetLeft)).size")
        assert columns == (1 if width == 360 else 2)


def test_a_picture_of_the_page_is_kept(playground: Playground) -> None:
    playground.page.emulate_media(color_scheme="light")
    playground.set(Prompt="the cat sat on the mat", Tokens="160")
    playground.run()
    playground.tokens("verified").nth(3).focus()
    PICTURE.parent.mkdir(exist_ok=True)
    playground.page.screenshot(path=PICTURE)
    assert PICTURE.read_bytes().startswith(b"\x89PNG")
