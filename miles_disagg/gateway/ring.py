"""Members on a circle by the hashes of their names: who stands near a text is the same for every gateway that knows the
same members, and is found without looking at all of them. Pure."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Iterator


def weight(text: str, name: str) -> bytes:
    """Rendezvous hash: of several names, the one with the greatest weight is the text's."""
    return hashlib.blake2b(f"{text}\0{name}".encode(), digest_size=8).digest()


class Ring:
    """Names in the order of their hashes."""

    def __init__(self) -> None:
        self._places: list[tuple[bytes, str]] = []

    def add(self, name: str) -> None:
        """A name that is not there yet."""
        insort(self._places, (weight("", name), name))

    def remove(self, name: str) -> None:
        """A name that is there."""
        del self._places[bisect_left(self._places, (weight("", name), name))]

    def after(self, text: str, most: int) -> Iterator[str]:
        """Up to `most` names, from the text's place on."""
        count = len(self._places)
        first = bisect_left(self._places, (weight("", text), ""))
        for i in range(min(most, count)):
            yield self._places[(first + i) % count][1]
