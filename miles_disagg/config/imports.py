"""Functions that a run plugs in by import path."""

import importlib
from collections.abc import Callable
from typing import Any

from miles_disagg.domain.errors import ConfigError


def import_function(path: str, flag: str) -> Callable[..., Any]:
    """The function at `package.module.function`; ConfigError naming `flag` if there is none."""
    module, _, attribute = path.replace(":", ".").rpartition(".")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError([f"{flag} {path}: {error}; give package.module.function"]) from error
    if not callable(function):
        raise ConfigError([f"{flag} {path}: not a function"])
    return function
