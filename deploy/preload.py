"""Imports what a replica needs, in the worker processes that start for replicas.

Ray imports this module in every new worker of a node where `RAY_preload_python_modules` names it, before the worker
gets its first work; `tide serve` and the image set that. It does something only where `env_vars` of the deployment have
`TIDE_PRELOAD: "1"`, so not in workers of other deployments, of Serve itself or of jobs.
"""

import os

PRELOAD = "TIDE_PRELOAD"

if os.environ.get(PRELOAD) == "1":
    from tide_core.models.quick_start import quick_start

    with quick_start():
        import deploy.app  # noqa: F401
        import tide_core.engine.engine  # noqa: F401
        from tide_core.models.loader import import_libraries

        import_libraries()
