"""What real clients get from the service, written as a table into docs/openai.md.

python -m benchmarks.clients                                  start the service of deploy/config.yaml, then ask it
python -m benchmarks.clients --url http://127.0.0.1:8000      ask one that runs
python -m benchmarks.clients --client openai --print          one client, and write no document
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import sys
from collections.abc import Iterator, Sequence

from benchmarks.clients.features import Service
from benchmarks.clients.run import CLIENTS, Result, run_client
from benchmarks.clients.table import BEGIN, END, markdown
from benchmarks.common import ROOT
from benchmarks.common.live import default_config, serving
from tools.reference.markdown import between

DOCUMENT = ROOT / "docs" / "openai.md"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a running service without keys; default: start one")
    parser.add_argument("--model", default="demo", help="its model's name")
    parser.add_argument("--client", action="append", choices=CLIENTS, help="only this one; may be repeated")
    parser.add_argument("--print", action="store_true", help="print the table instead of writing it")
    options = parser.parse_args(arguments)
    with _service(options.url, options.model) as at:
        results = {client: _told(client, run_client(client, at)) for client in options.client or CLIENTS}
    table = markdown(results, datetime.datetime.now(datetime.UTC).date().isoformat())
    failed = [result for result in results.values() if not all(one.passed for one in result.outcomes.values())]
    missing = [client for client, result in results.items() if result.version is None]
    if options.print or options.client:
        print(table)
    elif missing:
        print(f"not written: {', '.join(missing)} is not installed (make clients)", file=sys.stderr)
    else:
        DOCUMENT.write_text(between(DOCUMENT.read_text(encoding="utf-8"), BEGIN, END, table), encoding="utf-8")
        print(f"{DOCUMENT.relative_to(ROOT)}: written")
    return int(bool(failed or missing))


@contextlib.contextmanager
def _service(url: str | None, model: str) -> Iterator[Service]:
    if url is not None:
        yield Service(url.rstrip("/").removesuffix("/v1"), model)
        return
    print("starting the service of deploy/config.yaml", flush=True)
    with serving(default_config(), command=("tide", "serve")) as server:
        yield Service(server.url, model)


def _told(client: str, result: Result) -> Result:
    if result.version is None:
        print(f"{client}: not installed", flush=True)
    for feature, one in result.outcomes.items():
        state = "ok" if one.passed else "FAILED"
        print(f"{client} {result.version} {feature}: {state} {one.seconds} s {one.remark}".rstrip(), flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main())
