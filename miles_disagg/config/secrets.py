"""Bearer tokens in files, never on a command line where every user of the machine sees them; who needs one."""

import ipaddress
import re
from collections.abc import Iterator
from pathlib import Path

from miles_disagg.domain.errors import ConfigError

_TOKEN = re.compile(r"[\x21-\x7e]{8,512}")


def token_problems(flag: str, path: str) -> Iterator[str]:
    """What is wrong with a token file."""
    try:
        token = Path(path).expanduser().read_text(encoding="ascii").strip()
    except OSError as error:
        yield f"{flag} {path}: {error.strerror or error}"
    except UnicodeDecodeError:
        yield f"{flag} {path}: must be plain ASCII"
    else:
        if not _TOKEN.fullmatch(token):
            yield f"{flag} {path}: must hold one token of 8 to 512 printable characters without spaces"


def read_token(path: str | None, flag: str = "--auth-token-file") -> str | None:
    """The token in `path`; None without a path. ConfigError names what is wrong."""
    if path is None:
        return None
    problems = list(token_problems(flag, path))
    if problems:
        raise ConfigError(problems)
    return Path(path).expanduser().read_text(encoding="ascii").strip()


def exposure_problems(flag: str, host: str, token_file: str | None) -> Iterator[str]:
    """Listening beyond this machine without a token."""
    if not token_file and not is_loopback(host):
        yield f"{flag} {host} is reachable from other machines: give --auth-token-file PATH too"


def is_loopback(host: str) -> bool:
    """True for an address of this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
