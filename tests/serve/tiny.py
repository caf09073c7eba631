"""A config that serves two tiny models with exits: one behind keys, one open and soon full."""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

from benchmarks.common.live import default_config
from tests.evaluation.on_disk import save_artefact_for_it, save_model

KEY, NARROW_KEY = "key-of-team-a", "key-of-team-b"


def tiny_config(folder: Path) -> dict[str, Any]:
    model, artefact = save_model(folder / "model"), save_artefact_for_it(folder / "artefact")
    config = default_config(spare=False)
    app = config["applications"][0]
    app["name"] = "tiny"
    app["args"] = {
        "served_model_name": "tiny",
        "api_keys_file": str(_keys(folder / "keys.json")),
        "limits": {"max_tokens": 200, "body_timeout_s": 2.0},
        "engine": {
            "model": str(model),
            "artefact": str(artefact),
            "dtype": "float32",
            "num_threads": 1,
            "kv_memory_gib": 0.05,
            "suffix_drafts": False,  # a tiny model repeats itself, and streams are to last
        },
    }
    full = copy.deepcopy(app)
    full["name"], full["route_prefix"] = "full", "/full"
    full["import_path"] = "tests.serve.paced_app:build_app"
    full["runtime_env"]["env_vars"]["TIDE_TEST_HOLD_FILE"] = str(folder / "hold")
    full["args"] = {
        "served_model_name": "full",
        "engine": {**app["args"]["engine"], "artefact": "none", "max_rows": 1, "max_queued": 2},
    }
    full["deployments"][0].pop("user_config")
    config["applications"].append(full)
    return config


def _keys(path: Path) -> Path:
    entries = [
        {"name": "team-a", "sha256": hashlib.sha256(KEY.encode()).hexdigest()},
        {
            "name": "team-b",
            "sha256": hashlib.sha256(NARROW_KEY.encode()).hexdigest(),
            "modes": ["full", "verified"],
            "min_threshold": 0.5,
        },
    ]
    path.write_text(json.dumps({"keys": entries}))
    return path
