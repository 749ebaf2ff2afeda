"""Where the frozen models of a run answer, for reward, generate and log functions.

The run sets MILES_DISAGG_MODELS in the processes that call them: model name -> URLs, as JSON.
"""

import json
import os
from collections.abc import Mapping

from miles_disagg.domain.errors import ConfigError

VARIABLE = "MILES_DISAGG_MODELS"


def served_model(name: str, environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """URLs of the engines that serve the frozen model `name`. ConfigError names those that there are."""
    served = json.loads(environ.get(VARIABLE, "{}"))
    if name not in served:
        there = ", ".join(served) or "none"
        raise ConfigError([f"no frozen model is called {name!r} (there are: {there}): name it in --sglang-config FILE"])
    return tuple(served[name])
