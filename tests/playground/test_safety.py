"""The page is shut in: nothing from elsewhere, no markup out of text, no script but its own."""

from __future__ import annotations

from playwright.sync_api import expect

from deploy.http_api.pages import playground_page
from deploy.service import Service
from tests.playground.site import Playground, serve, stream, token

MARKUP = '<img src="x" onerror="document.title=1"><script>document.title=2</script><b id="made">bold</b>'


def test_the_page_is_one_file_and_asks_only_its_own_application(blank: Playground, service: Service) -> None:
    with serve(service, "/apps/tiny") as address:
        blank.visit(address)
        blank.set(Tokens="4")
        blank.run()
        blank.set(as_a_chat=False)
        blank.run()
    asked = {each.removeprefix(f"{address}/") for each in blank.addresses}
    assert asked == {"playground", "v1/models", "v1/chat/completions", "v1/completions"}
    html, _ = playground_page()
    assert "http" not in html


def test_text_of_the_server_stays_text(playground: Playground) -> None:
    playground.answer(lambda body: stream(token(MARKUP), error=MARKUP))
    playground.set(compare_with_full_depth=False)
    playground.run()
    assert playground.text("verified") == MARKUP
    expect(playground.page.get_by_role("alert")).to_have_text(MARKUP)
    playground.tokens("verified").first.focus()
    assert "onerror" in playground.detail("verified")
    expect(playground.page.locator("#made, #runs img")).to_have_count(0)
    expect(playground.page).to_have_title("TIDE playground")


BREACHES = [
    "document.body.innerHTML = '<b>markup</b>'",
    "document.body.append(Object.assign(document.createElement('script'), {textContent: 'document.title = 1'}))",
    "document.body.setAttribute('onclick', 'document.title = 1')",
    "document.body.setAttribute('style', 'color: red')",
    "document.head.append(Object.assign(document.createElement('style'), {textContent: 'p { color: red }'}))",
    "fetch('http://127.0.0.1:9/elsewhere')",
    "new Image().src = 'http://127.0.0.1:9/picture.png'",
    "document.body.append(Object.assign(document.createElement('iframe'), {src: '/health'}))",
]


def test_the_policy_forbids_what_the_page_never_does(playground: Playground) -> None:
    """So that no complaint in all other tests means something."""
    page = playground.page
    page.evaluate("""document.addEventListener("securitypolicyviolation", () => {
        document.body.dataset.breaches = 1 + Number(document.body.dataset.breaches ?? 0); })""")
    for number, breach in enumerate(BREACHES, 1):
        page.evaluate(f"async () => {{ try {{ await ({breach}) }} catch {{}} }}")
        expect(page.locator("body"), breach).to_have_attribute("data-breaches", str(number))
        assert any("Content Security Policy" in each or "Trusted" in each for each in playground.complaints), breach
        playground.complaints.clear()


def test_no_other_page_may_frame_it(playground: Playground, address: str) -> None:
    headers = playground.page.request.get(f"{address}/playground").headers
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
