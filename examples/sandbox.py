"""Run a Python program that nobody trusts, on Linux: a process of its own with limits, killed with all its children.

What holds it: CPU seconds, memory, file size, open files and processes (rlimits); an empty environment and an empty
directory that is removed afterwards; isolated mode without site packages; network and process namespaces of its own
where the kernel allows them (no network, and the whole tree dies with its first process); wall-clock time; started by
root, it runs as nobody. What does not: it can read whatever files its user can read, and where there are no namespaces
a child that leaves its process group outlives it. Against a determined attacker use a container or a virtual machine.
"""

import asyncio
import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

NOBODY = 65534


@dataclass(frozen=True)
class Limits:
    """Seconds of CPU and of wall time, bytes of memory, of one file and of kept output, processes at once."""

    cpu: int = 2
    wall: float = 5.0
    memory: int = 256 << 20
    file: int = 1 << 20
    output: int = 1 << 16
    processes: int = 32


@dataclass(frozen=True)
class Result:
    """What came of a program: its end, an error (its own, or a limit), or the clock.

    text: its output and errors together, cut at the limit.
    """

    status: Literal["ok", "error", "timeout"]
    text: str


@functools.cache
def isolation() -> tuple[str, ...]:
    """The command that gives a program namespaces of its own; empty where the kernel, or a container, forbids it."""
    user = () if os.getuid() == 0 else ("--user", "--map-root-user")
    command = ("unshare", *user, "--net", "--pid", "--fork", "--kill-child")
    if shutil.which(command[0]) is None:
        return ()
    tried = subprocess.run([*command, "true"], capture_output=True, timeout=10)
    return command if tried.returncode == 0 else ()


@functools.cache
def interpreter() -> str:
    """A Python that the program's user may run: this one, or the system's where root's own is out of nobody's reach."""
    if os.getuid() != 0:
        return sys.executable
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        command = [python, "-I", "-S", "-c", "import math, json"]
        with contextlib.suppress(OSError):
            nobody = {"user": NOBODY, "group": NOBODY, "extra_groups": [], "cwd": "/"}
            if subprocess.run(command, capture_output=True, timeout=30, **nobody).returncode == 0:
                return python
    raise RuntimeError("no Python here may be run by `nobody`: install the system's python3, or do not run as root")


async def run_python(code: str, limits: Limits = Limits()) -> Result:
    """Run `code` and return what it printed. Nothing of it is left when this returns, or is cancelled."""
    directory = tempfile.mkdtemp(prefix="sandbox-")
    try:
        prefix, python = await asyncio.to_thread(isolation), await asyncio.to_thread(interpreter)
        if os.getuid() == 0:
            os.chown(directory, NOBODY, NOBODY)
        process = await asyncio.create_subprocess_exec(
            *prefix, python, "-I", "-S", "-c", _LIMITED, *map(str, _numbers(limits)), code,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            cwd=directory, env={"PATH": "/usr/bin:/bin", "HOME": directory}, start_new_session=True,
        )  # fmt: skip
        try:
            text, timed_out = await _output(process, limits)
        finally:
            _kill(process)
            await process.wait()
        # What unshare says is that the program was killed, by a limit.
        text = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("unshare: "))
        return Result("timeout" if timed_out else "error" if process.returncode else "ok", text)
    finally:
        await asyncio.to_thread(shutil.rmtree, directory, True)


# The child sets its limits itself, so that nothing of ours runs between fork and exec. The kernel counts the processes
# of a user, and never root's.
_LIMITED = """
import os, resource, sys
cpu, memory, size, processes = map(int, sys.argv[1:5])
code = sys.argv[5]
sys.argv[1:] = []
for what, most in (
    (resource.RLIMIT_CPU, cpu), (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, size),
    (resource.RLIMIT_NOFILE, 32), (resource.RLIMIT_NPROC, processes), (resource.RLIMIT_CORE, 0),
):
    resource.setrlimit(what, (most, most))
with open("/proc/self/uid_map") as file:
    real_root = os.getuid() == 0 and file.read().split() == ["0", "0", "4294967295"]
if real_root:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})
"""


def _numbers(limits: Limits) -> tuple[int, int, int, int]:
    return limits.cpu, limits.memory, limits.file, limits.processes


async def _output(process: asyncio.subprocess.Process, limits: Limits) -> tuple[str, bool]:
    """What the program wrote, up to the limit, and whether its time was over first. More output is read and dropped."""
    kept = bytearray()

    async def read() -> None:
        assert process.stdout is not None
        while block := await process.stdout.read(1 << 14):
            kept.extend(block[: max(0, limits.output - len(kept))])

    try:
        async with asyncio.timeout(limits.wall):
            await read()
            await process.wait()
    except TimeoutError:
        return kept.decode(errors="replace"), True
    return kept.decode(errors="replace"), False


def _kill(process: asyncio.subprocess.Process) -> None:
    """End the process group, and the first process of the namespace by name: all others in it die with that one."""
    if process.returncode is not None:
        return
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
