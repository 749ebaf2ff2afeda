"""Starts a server and sees that nothing of it outlives its owner. Standard library only; run as a script.

`python guard.py --parent PID -- COMMAND...` runs COMMAND in this process's own group. It ends with COMMAND's status.
When the parent dies, or this process is told to stop, the whole group is asked to end and, after a grace period,
killed. If this process itself is killed, the kernel ends COMMAND.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time

_GRACE_SECONDS = 10.0
_POLL_SECONDS = 0.3
_PR_SET_PDEATHSIG = 1


def _die_with_guard() -> None:
    """In the child, before exec. The guard has a single thread, so the signal comes exactly when it dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def _others() -> list[int]:
    """Live processes of this group, without this one. (Where nobody reaps orphans, zombies stay; they do not count.)"""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat") as stat:
                state, _, group = stat.read().rpartition(")")[2].split()[:3]
                if int(group) == os.getpid() and state != "Z":
                    found.append(int(entry))
    return found


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """SIGTERM to everything in the group, once, then SIGKILL to what is left after the grace period."""
    _signal_others(signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_SECONDS
    while child.poll() is None or _others():
        if time.monotonic() > deadline:
            _signal_others(signal.SIGKILL)
        time.sleep(0.1)


def _signal_others(number: int) -> None:
    for pid in _others():
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def main(argv: list[str]) -> int:
    """See the module."""
    if len(argv) < 4 or argv[0] != "--parent" or argv[2] != "--":
        print("usage: guard.py --parent PID -- COMMAND...", file=sys.stderr)
        return 2
    parent, command = int(argv[1]), argv[3:]
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    stopping = False

    def stop(*_: object) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    try:
        child = subprocess.Popen(command, preexec_fn=_die_with_guard)
    except OSError as e:
        print(f"cannot run {command[0]}: {e}", file=sys.stderr, flush=True)
        return 127
    while child.poll() is None and not stopping and os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    _end_group(child)  # also what a server that ended by itself left behind
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
