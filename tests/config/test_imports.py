"""A mistake on the command line is answered before anything heavy is imported."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
from miles_disagg.cli import main
try:
    status = main({argv!r})
except SystemExit as error:
    status = error.code
heavy = {{"torch", "ray", "transformers", "numba", "megatron", "aiohttp", "numpy"}} & set(sys.modules)
print("STATUS", status, "HEAVY", sorted(heavy))
"""


@pytest.mark.parametrize(
    ("argv", "status"),
    [
        (["--help"], 0),
        (["train", "--help"], 0),
        (["train", "--nonsense"], 2),
        (["train", "--lr", "fast"], 2),
        (["train", "--config", "/nowhere.yaml"], 2),
        (["nonsense"], 2),
    ],
)
def test_help_and_bad_flags_import_nothing_heavy(argv: list[str], status: int):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(argv=argv)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == f"STATUS {status} HEAVY []"
    assert "Traceback" not in done.stderr
