"""Changed words only, peer to peer: what an engine's staging area needs to become the version that was staged.

The words are put into a mailbox behind the staging area and patched in there by the engine's plugin; the checksums of
the whole area are compared as for a complete transfer, so that changes on anything but the version before are found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from miles_disagg.engine.inplace.miles_inplace.memory import INTEGERS
from miles_disagg.engine.inplace.miles_inplace.transport import Region
from miles_disagg.weights.transfer.link import Link, Patch
from miles_disagg.weights.transfer.plan import Mailbox, Write


class Changes:
    """One source rank's copy of the version before, and its outbox. Per version: `keep`, `patch`, `sent`."""

    def __init__(self) -> None:
        self._buffer = self._before = self._outbox = torch.empty(0, dtype=torch.uint8)
        self._boxes: Mapping[int, Mailbox] = {}
        self._places: dict[int, int] = {}
        self._word = 2
        self._version, self._before_version = "", ""
        self._held: dict[int, tuple[str, str]] = {}  # by target: registration and version of its staging area

    def route(self, buffer: torch.Tensor, boxes: Mapping[int, Mailbox], word: int) -> torch.Tensor:
        """Adopt a send buffer (uint8 [n]) and mailboxes; the outbox, to be registered. word: bytes compared at once."""
        self._buffer, self._boxes, self._word = buffer, boxes, word
        self._before = torch.zeros_like(buffer)
        self._places, at = {}, 0
        for target, box in boxes.items():
            self._places[target], at = at, at + box.room
        self._outbox = torch.zeros(at, dtype=torch.uint8, device=buffer.device)
        self._version = self._before_version = ""
        self._held.clear()
        return self._outbox

    def keep(self) -> None:
        """The send buffer is about to be packed anew: keep what it holds."""
        self._before.copy_(self._buffer)
        self._before_version, self._version = self._version, ""

    def sent(self, version: str, links: Sequence[Link]) -> None:
        """These engine ranks have `version`, which is in the send buffer, in their staging areas."""
        self._version = version
        self._held.update({link.target: (link.token, version) for link in links if link.mode == "staging"})

    def patch(self, link: Link, writes: Sequence[Write]) -> tuple[Patch, list[Region], list[Region]] | None:
        """Fill the outbox with what changed for one engine rank: the patch, and what to write from where to where.

        None if it has another version, or if the changes do not fit into its mailbox.
        """
        box = self._boxes.get(link.target)
        known = self._before_version and self._held.get(link.target) == (link.token, self._before_version)
        if box is None or not known or not link.mail:
            return None
        word, width = self._word, 4 if box.span // self._word < 2**31 else 8
        positions, values = list[torch.Tensor](), list[torch.Tensor]()
        count = 0
        for w in writes:
            new = self._buffer[w.packed : w.packed + w.nbytes].view(INTEGERS[word])
            old = self._before[w.packed : w.packed + w.nbytes].view(INTEGERS[word])
            where = (new != old).nonzero().flatten()
            count += where.numel()
            if count and -(-count * width // 8) * 8 + count * word > box.room:
                return None
            positions.append((where + (w.staged - box.begin) // word).to(INTEGERS[width]))
            values.append(new[where])
        patch = [box.at, count, word, width, box.begin]
        if not count:
            return patch, [], []
        at, place = -(-count * width // 8) * 8, self._places[link.target]
        outbox = self._outbox[place : place + at + count * word]
        outbox[: count * width].view(INTEGERS[width]).copy_(torch.cat(positions))
        outbox[at:].view(INTEGERS[word]).copy_(torch.cat(values))
        if outbox.is_cuda:
            torch.cuda.current_stream(outbox.device).synchronize()
        number = outbox.device.index or 0
        return patch, [(outbox.data_ptr(), outbox.numel(), number)], [(link.base + box.at, outbox.numel(), link.device)]
