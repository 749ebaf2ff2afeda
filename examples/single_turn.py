"""Generate function: one turn, which is also what a run does without one.

`--custom-generate-function-path examples.single_turn.generate`
"""

from miles_disagg.rollout.trajectory import Trajectory


async def generate(trajectory: Trajectory) -> None:
    """Let the policy write until it stops."""
    await trajectory.generate()
