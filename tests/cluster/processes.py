"""Finding processes by what is in their environment or command line, through /proc."""

import contextlib
import os
import time
from pathlib import Path


def with_text(text: str, part: str = "environ") -> list[int]:
    """Process ids (other than this one) whose `environ` or `cmdline` contains `text`; zombies have neither."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if text.encode() in (entry / part).read_bytes():
                    found.append(int(entry.name))
    return found


def gone(text: str, timeout: float) -> list[int]:
    """Wait until no process has `text` in its environment; those that are left after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while left := with_text(text):
        if time.monotonic() > deadline:
            return left
        time.sleep(0.2)
    return []
