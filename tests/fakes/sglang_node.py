"""Stands in for `python -m sglang.launch_server`: the first node answers as an engine, the others stay and say nothing.

`as_python(directory)` makes an interpreter whose every module is this one. Each start appends a line to `starts.jsonl`
beside it: pid, rank, visible GPUs and arguments. A file `fail-N` there ends rank N at once; `taken-N`, one `x` for each
start that it spoils, makes rank N say that a port is in use and stay, as SGLang does.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def as_python(directory: Path) -> Path:
    """An executable to give as --sglang-python."""
    path = directory / "python"
    path.write_text(
        f"#!/bin/sh\ncd {ROOT}\nexport FAKE_DIRECTORY={directory}\nPYTHONPATH={ROOT} exec {sys.executable} "
        '-m tests.fakes.sglang_node "$@"\n'
    )
    path.chmod(0o755)
    return path


def starts(directory: Path) -> list[dict[str, Any]]:
    """What was started there so far."""
    path = directory / "starts.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main(argv: list[str]) -> None:
    assert argv[:2] == ["-m", "sglang.launch_server"], argv
    flags = dict(zip(argv[2::1], argv[3::1], strict=False))
    directory, rank = Path(os.environ["FAKE_DIRECTORY"]), int(flags.get("--node-rank", 0))
    taken = directory / f"taken-{rank}"
    left = taken.read_text() if taken.exists() else ""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
    row = {"pid": os.getpid(), "rank": rank, "gpus": gpus, "argv": argv[2:], "spoiled": bool(left)}
    with open(directory / "starts.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")
    if (directory / f"fail-{rank}").exists():
        print(f"rank {rank} cannot go on")
        raise SystemExit(7)
    if left:
        taken.write_text(left[1:])
        print("[Errno 98] error while attempting to bind on address: address already in use", flush=True)
        time.sleep(3600)
    if rank:
        time.sleep(3600)
    meet, count = flags.get("--dist-init-addr"), int(flags.get("--nnodes", 1))
    while (
        sum(meet in r["argv"] and not r["spoiled"] for r in starts(directory)) < count
        or (directory / "fail-1").exists()
    ):
        time.sleep(0.05)  # like SGLang's first node, it answers when all are there
    asyncio.run(serve(flags))


async def serve(flags: dict[str, str]) -> None:
    """As an engine at the flags' port and version."""
    from tests.fakes.router import FakeMember

    member = FakeMember(flags["--weight-version"], dtype="float32", disable_radix_cache=True)
    member.port, member.model_path = int(flags["--port"]), flags["--model-path"]
    await member.start()
    await asyncio.sleep(3600)


if __name__ == "__main__":
    main(sys.argv[1:])
