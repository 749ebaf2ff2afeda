"""Generate function: several turns with a Python interpreter in a sandbox. The policy writes `<python>...</python>`.

`--custom-generate-function-path examples.python_tool.generate`

What the code prints comes back as `<result>...</result>`, as tokens and masked. The policy's own tokens are never
tokenized again. The sandbox is `examples.sandbox`.
"""

import asyncio

from examples.sandbox import run_python
from miles_disagg.rollout.trajectory import Trajectory

OPEN, CLOSE = "<python>", "</python>"
MAX_TURNS = 4
MAX_OUTPUT = 400
"""Characters of a result that are given back."""
CONCURRENT = 2
"""Programs that run at once."""

_slots: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}


async def generate(trajectory: Trajectory) -> None:
    """Let the policy write; whenever it closes a program, run it, append the result and let it go on."""
    slots = _slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(CONCURRENT))
    for _ in range(MAX_TURNS):
        turn = await trajectory.generate(stop=[*trajectory.sampling.stop, CLOSE])
        ended = turn.finish_reason != "stop" or turn.tokens[-1] == trajectory.tokenizer.eos_token_id
        if ended or OPEN not in turn.text:
            return
        async with slots:
            result = await run_python(turn.text.rpartition(OPEN)[2].removesuffix(CLOSE))
        trajectory.metadata["programs"] = [*trajectory.metadata.get("programs", []), result.status]
        if not trajectory.append_text(f"<result>{result.text[:MAX_OUTPUT].strip()}</result>"):
            return
