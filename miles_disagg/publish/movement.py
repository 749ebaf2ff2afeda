"""The alarm for a policy that does not move: updates are published, and the weights stay what they were."""

from __future__ import annotations

from miles_disagg.domain.versions import VersionRef


class MovementWatch:
    """Watches consecutive publications. patience: how many without movement are an alarm."""

    def __init__(self, patience: int = 2):
        self._patience, self._still, self._fingerprint = patience, 0, ""

    def observe(
        self, ref: VersionRef, *, learning_rate: float, changed_elements: int | None = None, fingerprint: str = ""
    ) -> str | None:
        """The alarm's text, or None. changed_elements: of a delta (None: not known); fingerprint: of all the weights.

        Nothing moves without a learning rate, so a warm-up that starts at 0 is no alarm.
        """
        same = changed_elements == 0 or (bool(fingerprint) and fingerprint == self._fingerprint)
        self._fingerprint = fingerprint or self._fingerprint
        self._still = self._still + 1 if same and learning_rate > 0 else 0
        repeated = bool(fingerprint) and self._still >= self._patience - 1
        if not same or learning_rate <= 0 or not (self._still >= self._patience or repeated):
            return None
        return (
            f"{ref}: the policy does not move. The learning rate is {learning_rate:g}, yet "
            f"{self._still + repeated} publications in a row have the same weights. Are gradients zero, is "
            "every advantage zero, or does bf16 round the updates away?"
        )
