"""Dynamic sampling filter: train only on prompts that are neither solved nor hopeless (DAPO, arXiv 2503.14476, 3.2).

`--dynamic-sampling-filter-path examples.filter.neither_solved_nor_hopeless`
"""

from miles_disagg.domain.samples import SampleGroup


def neither_solved_nor_hopeless(group: SampleGroup) -> str | None:
    """The reason to drop the group, under which the ledger counts it; None keeps it."""
    rewards = group.rewards
    if max(rewards) == min(rewards):
        return "all_right" if rewards[0] > 0 else "all_wrong"
    return None
