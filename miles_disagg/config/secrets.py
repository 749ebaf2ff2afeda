"""Bearer tokens in files: never on a command line, where every user of the machine sees them."""

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
