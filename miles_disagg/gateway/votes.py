"""Which digest of a version is the published one: the one that most replicas found in the store. Pure."""

from __future__ import annotations

from collections import Counter

from miles_disagg.gateway.heartbeat import Fingerprint


class Votes:
    """What the members of a fleet found, counted as they come and go: asking costs nothing however many they are."""

    def __init__(self) -> None:
        self._found: dict[str, Counter[str]] = {}

    def change(self, before: Fingerprint | None, after: Fingerprint | None) -> set[str]:
        """A member's fingerprint changed (None: it has none). Returns the versions whose published digest is another
        one now."""
        versions = {f.version for f in (before, after) if f is not None}
        was = {version: self.published(version) for version in versions}
        if before is not None:
            found = self._found[before.version]
            found[before.published] -= 1
            if not found[before.published]:
                del found[before.published]
            if not found:
                del self._found[before.version]
        if after is not None:
            self._found.setdefault(after.version, Counter())[after.published] += 1
        return {version for version in versions if was[version] not in (None, self.published(version))}

    def published(self, version: str) -> str | None:
        """The digest that most found; of two found equally often, the one that was found first."""
        found = self._found.get(version)
        return None if found is None else max(found, key=lambda digest: found[digest])
