"""Fetch the weights of a model onto a volume, before anything serves or calibrates it.

python -m deploy.fetch Qwen/Qwen3-0.6B                       into the hub's cache (HF_HUB_CACHE)
python -m deploy.fetch s3://bucket/models/mine --models DIR  into DIR/mine

A complete model is not fetched again; an interrupted one continues.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from deploy.object_store import is_url
from deploy.weights import fetch_model
from tide_core.cli.exit_codes import with_exit_code
from tide_core.errors import ModelError


@with_exit_code
def main(
    model: Annotated[str, typer.Argument(help="A Hugging Face id, or the URL of a folder in an object store.")],
    models: Annotated[Path, typer.Option(help="Folder for models from a URL.")] = Path("models"),
) -> None:
    """Fetch a model and print its folder."""
    from tide_core.models import hub

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if is_url(model):
        folder = fetch_model(model, models)
    elif hub.is_hub_id(model):
        folder = hub.fetch(model)
    else:
        raise ModelError("model", model, "a Hugging Face id (name or org/name), or a URL such as s3://bucket/folder")
    typer.echo(str(folder))


if __name__ == "__main__":
    typer.run(main)
