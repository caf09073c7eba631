"""The workflow of a hosted CI: it runs what the repository has, publishes only what it tested, and names no place."""

from __future__ import annotations

import re
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILE = ROOT / ".github" / "workflows" / "ci.yml"
TEXT = FILE.read_text(encoding="utf-8")
WORKFLOW: dict[Any, Any] = yaml.safe_load(TEXT)
JOBS: dict[str, dict[str, Any]] = WORKFLOW["jobs"]
STEPS = [(name, step) for name, job in JOBS.items() for step in job["steps"]]
SCRIPTS = [(name, step["run"]) for name, step in STEPS if "run" in step]
OF_A_TAG = "startsWith(github.ref, 'refs/tags/v')"


def needed_by(job: str) -> set[str]:
    """All jobs that have to end well before this one begins."""
    needs = JOBS[job].get("needs", [])
    direct = {needs} if isinstance(needs, str) else set(needs)
    return direct.union(*(needed_by(each) for each in direct)) if direct else set()


def test_it_runs_the_tests_that_everybody_runs() -> None:
    assert [step["run"] for step in JOBS["test"]["steps"] if "run" in step] == [".ci/run"]
    assert (ROOT / ".ci" / "run").is_file()


def test_it_runs_for_every_change_and_every_week() -> None:
    events = WORKFLOW[True]  # YAML reads the key `on` so
    assert {"push", "pull_request", "schedule"} == events.keys()
    assert "pull_request_target" not in TEXT, "it would give secrets to strangers' code"


@pytest.mark.parametrize(("job", "script"), SCRIPTS)
def test_scripts_are_sound_and_take_values_from_variables_only(job: str, script: str) -> None:
    assert "${{" not in script, "a name of a branch could be a command"
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_files_of_the_repository_that_it_names_exist() -> None:
    named = {
        path
        for _, script in SCRIPTS
        for path in re.findall(r"(?<![\w/.$])(?:\./)?((?:deploy|packages|tools)/[\w./-]+)", script)
    }
    assert named
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_every_package_that_make_builds_is_built_and_published() -> None:
    command = re.search(r"pip wheel .* -w dist (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert command is not None
    folders = [folder.removeprefix("./") for folder in command[1].split()]
    assert len(folders) == 2
    [download] = [step["with"] for job, step in STEPS if job == "publish-wheels" and "with" in step]
    for folder in folders:
        build = rf"build_wheel\.sh {re.escape(folder)} |wheel .* (?:\./)?{re.escape(folder)}$"
        [job] = {name for name, script in SCRIPTS if re.search(build, script, re.MULTILINE)}
        [uploaded] = [step["with"]["name"] for name, step in STEPS if name == job and "upload-artifact" in str(step)]
        assert fnmatch(uploaded, download["pattern"])
        assert job in needed_by("publish-wheels")


def test_the_arguments_of_the_image_are_those_of_the_build_file() -> None:
    given = set(re.findall(r"--build-arg (\w+)=", TEXT))
    assert given
    assert given <= set(re.findall(r"^ARG (\w+)", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE))


def test_every_locked_package_is_looked_up() -> None:
    script = next(script for job, script in SCRIPTS if job == "dependencies")
    assert {path.name for path in (ROOT / "deploy").glob("*.lock")} == set(re.findall(r"deploy/(\S+\.lock)", script))


def test_the_image_that_is_published_is_the_one_that_was_scanned() -> None:
    scripts = [script for job, script in SCRIPTS if job == "image"]
    order = [
        next(at for at, script in enumerate(scripts) if word in script)
        for word in ("docker build", "--exit-code 1", "docker push")
    ]
    assert order == sorted(order)
    assert "HIGH,CRITICAL" in scripts[order[1]]
    assert sum("docker build" in script for script in scripts) == 1


@pytest.mark.parametrize("job", ["image", "publish-wheels"])
def test_nothing_is_published_that_was_not_tested_and_looked_up(job: str) -> None:
    assert needed_by(job) >= {"test", "dependencies"}


def test_only_a_tag_publishes_and_only_such_steps_see_secrets() -> None:
    publishing = [(job, step) for job, step in STEPS if re.search(r"docker push|twine\W.* upload", step.get("run", ""))]
    assert len(publishing) == 2
    for job, step in STEPS:
        if "secrets." in str(step) or (job, step) in publishing:
            assert OF_A_TAG in str(step.get("if", "")) + str(JOBS[job].get("if", ""))
            assert "release" in str(JOBS[job]["environment"])
    assert "secrets." not in str({key: value for key, value in WORKFLOW.items() if key != "jobs"})


def version_of(folder: Path) -> str:
    return str(tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])


def test_the_versions_of_the_packages_are_checked_before_anything_is_published(tmp_path: Path) -> None:
    assert "version" in needed_by("publish-wheels")
    check = JOBS["version"]["steps"][-1]["run"]
    push = next(script for _, script in SCRIPTS if "docker push" in script)
    assert push.startswith('grep -qx "version = \\"${GITHUB_REF_NAME#v}\\"" pyproject.toml\n')

    def code_of(tag: str, *versions: str) -> int:
        for folder, version in zip((tmp_path, tmp_path / "packages" / "tide-client"), versions, strict=True):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "pyproject.toml").write_text(f'[project]\nversion = "{version}"\n', encoding="utf-8")
        environment = {"GITHUB_REF_NAME": tag, "PATH": "/usr/bin:/bin"}
        return subprocess.run(["bash", "-ec", check], cwd=tmp_path, env=environment, check=False).returncode

    assert code_of("v1.2.3", "1.2.3", "1.2.3") == 0
    assert 0 not in (code_of("v1.2.3", "1.2.4", "1.2.3"), code_of("v1.2.3", "1.2.3", "1.2.4"))
    assert version_of(ROOT) == version_of(ROOT / "packages" / "tide-client")


def test_it_names_no_registry_and_uses_nobodys_actions_but_the_hosts() -> None:
    assert {step["uses"].split("@")[0] for _, step in STEPS if "uses" in step} <= {
        "actions/checkout",
        "actions/setup-python",
        "actions/upload-artifact",
        "actions/download-artifact",
    }
    assert not re.search(r"\b[\w-]+\.(?:io|com|org|dev|net)\b", TEXT)


def test_jobs_may_only_read_the_repository_and_each_has_an_end() -> None:
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert not any("permissions" in job for job in JOBS.values())
    assert all(job["timeout-minutes"] <= 180 for job in JOBS.values())
    for _, step in STEPS:
        if step.get("uses", "").startswith("actions/checkout"):
            assert step["with"]["persist-credentials"] is False
