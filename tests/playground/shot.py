"""The picture of the quick start: the demo model, verified next to full depth.

python -m tests.playground.shot docs/playground.png
"""

from __future__ import annotations

import sys

from deploy.service import Service
from tests.playground.site import Playground, find_chromium, open_browser, serve
from tide_core.engine.engine import Engine

PATIENCE_MS = 120_000


def main(path: str) -> None:
    executable = find_chromium()
    if executable is None:
        sys.exit("no Chromium found: install it or set TIDE_CHROMIUM")
    engine = Engine("demo", num_threads=2)
    with serve(Service(engine, model="demo")) as address, open_browser(executable) as browser:
        playground = Playground(browser.new_page(viewport={"width": 1280, "height": 900}, device_scale_factor=1.5))
        playground.patience_ms = PATIENCE_MS
        playground.visit(address)
        playground.run()  # what is slow only once is over
        print(playground.run())
        playground.box("verified").locator(".token.early").nth(1).focus()
        playground.page.screenshot(path=path)
    engine.close()


if __name__ == "__main__":
    main(sys.argv[1])
