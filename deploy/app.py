"""The Serve application: wiring only."""

# No `from __future__ import annotations` here: Serve reads the class of `build_app`'s argument from its annotation.

from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application

from deploy.args import AppArgs
from deploy.http_api import build_api
from tide_core.errors import EngineDeadError


@serve.deployment
@serve.ingress()
class TideServer:
    """One engine and its HTTP routes in one replica: no hop between the two."""

    def __init__(self, engine: dict[str, Any], served_model_name: str | None) -> None:
        from tide_core.engine.engine import Engine  # torch comes with it; only replicas need that

        self._engine = Engine(**engine)
        self._model = served_model_name or self._engine.model_name

    def __serve_build_asgi_app__(self) -> FastAPI:
        return build_api(self._engine, self._model)

    def check_health(self) -> None:
        """Serve replaces a replica that raises here."""
        if self._engine.stats().dead:
            raise EngineDeadError("the engine loop has stopped")

    def __del__(self) -> None:
        if hasattr(self, "_engine"):
            self._engine.close()


def build_app(args: AppArgs) -> Application:
    """What `import_path` names: arguments checked, one deployment bound."""
    return TideServer.bind(args.engine, args.served_model_name)  # type: ignore[attr-defined]  # added by serve.deployment
