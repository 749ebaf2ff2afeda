"""Policy versions: references, constraints, pointer rules and token spans.

What a version *is*, and when one may follow another. Where its bytes live is `store`; who serves it is `replica`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles_disagg.domain.errors import InvalidConstraint, InvalidVersionRef, PointerConflict

RUN_ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_VERSION_DIR = re.compile(r"weight_v(\d{6,})")


def check_run_id(run_id: str) -> str:
    """Return `run_id` if it is legal, else raise InvalidVersionRef."""
    if not isinstance(run_id, str) or not RUN_ID_PATTERN.fullmatch(run_id) or ".." in run_id:
        raise InvalidVersionRef(
            f"run id {run_id!r} is not legal: 1 to 64 letters, digits, '.', '_' or '-', starting with a letter or digit"
        )
    return run_id


@dataclass(frozen=True, order=True)
class VersionRef:
    """An immutable set of rollout-visible weights, printed `run/weight_v000007`. Version 0 is the base."""

    run_id: str
    version: int

    def __post_init__(self) -> None:
        check_run_id(self.run_id)
        if isinstance(self.version, bool) or not isinstance(self.version, int) or self.version < 0:
            raise InvalidVersionRef(f"version {self.version!r} of run {self.run_id} is not a non-negative integer")

    @property
    def directory(self) -> str:
        """Name of this version's directory below its run: `weight_v000007`."""
        return version_directory(self.version)

    def next(self) -> VersionRef:
        """The version after this one, of the same run."""
        return VersionRef(self.run_id, self.version + 1)

    def __str__(self) -> str:
        return f"{self.run_id}/{self.directory}"

    @classmethod
    def parse(cls, text: str) -> VersionRef:
        """Parse `run/weight_v000007`. Anything else is InvalidVersionRef, never the base."""
        run_id, slash, directory = str(text).partition("/")
        if not slash:
            raise InvalidVersionRef(f"{text!r} is not a version reference like run/weight_v000007")
        return cls(run_id, parse_version_directory(directory))


def version_directory(version: int) -> str:
    """`7` -> `weight_v000007`."""
    return f"weight_v{version:06d}"


def parse_version_directory(name: str) -> int:
    """`weight_v000007` -> `7`; anything else is InvalidVersionRef."""
    match = _VERSION_DIR.fullmatch(name)
    if not match:
        raise InvalidVersionRef(f"{name!r} is not a version directory like weight_v000007")
    return int(match.group(1))


def parse_engine_version(text: str | None, run_id: str) -> int | None:
    """Version that an engine's `weight_version` string names for `run_id`; None for another run or a foreign string.

    Engines are stamped with `str(VersionRef)`, so a stamp left by another run can never be taken for ours.
    """
    try:
        ref = VersionRef.parse(text or "")
    except InvalidVersionRef:
        return None
    return ref.version if ref.run_id == run_id else None


def check_advance(current: VersionRef | None, proposed: VersionRef, expected: VersionRef | None) -> None:
    """Raise PointerConflict unless the pointer may move from `current` to `proposed`.

    `expected` is where the writer believes the pointer to be. Within a run the pointer only moves forward; another
    run may take over only from the position its claim saw.
    """
    if current != expected:
        raise PointerConflict(expected, current, proposed)
    if current is not None and current.run_id == proposed.run_id and proposed.version <= current.version:
        raise PointerConflict(expected, current, proposed, "The pointer never moves backwards within a run.")


# --- constraints ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Constraint:
    """What a request demands of the version that serves it: a minimum, an exact version, or nothing."""

    min_version: int | None = None
    exact_version: int | None = None

    def __post_init__(self) -> None:
        if self.min_version is not None and self.exact_version is not None:
            raise InvalidConstraint("weight_version: give min_version or exact_version, not both")

    def satisfied_by(self, version: int | None) -> bool:
        """True if a replica at `version` may serve this request now (None: serves nothing)."""
        if version is None:
            return False
        if self.exact_version is not None:
            return version == self.exact_version
        return self.min_version is None or version >= self.min_version

    def to_json(self) -> dict[str, int] | None:
        """The request-body form of PROTOCOL.md section 2; None for no constraint."""
        if self.exact_version is not None:
            return {"exact_version": self.exact_version}
        return None if self.min_version is None else {"min_version": self.min_version}

    @classmethod
    def from_json(cls, value: Any) -> Constraint:
        """Parse a request's `weight_version` field. Malformed: InvalidConstraint naming the field."""
        if value is None:
            return cls()
        if not isinstance(value, Mapping):
            raise InvalidConstraint('weight_version: must be an object like {"min_version": 3} or {"exact_version": 3}')
        unknown = set(value) - {"min_version", "exact_version"}
        if unknown:
            raise InvalidConstraint(f"weight_version: unknown field(s) {sorted(map(str, unknown))}")
        for field, number in value.items():
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise InvalidConstraint(f"weight_version.{field}: must be a non-negative integer, got {number!r}")
        return cls(value.get("min_version"), value.get("exact_version"))

    def __str__(self) -> str:
        if self.exact_version is not None:
            return f"exact version {self.exact_version}"
        return "any version" if self.min_version is None else f"version >= {self.min_version}"


ANY_VERSION = Constraint()


# --- attribution ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenSpan:
    """Tokens from `first_token` (index into the response) up to the next span were written by `version`."""

    first_token: int
    version: int


def normalise_spans(spans: Sequence[TokenSpan], n_tokens: int) -> tuple[TokenSpan, ...]:
    """Drop empty spans and merge neighbours of one version. Result covers [0, n_tokens) in ascending order.

    A response without tokens keeps one span, of the last version that had it.
    """
    out: list[TokenSpan] = []
    for i, span in enumerate(spans):
        end = spans[i + 1].first_token if i + 1 < len(spans) else n_tokens
        if span.first_token < end and not (out and out[-1].version == span.version):
            out.append(span)
    if not out and spans:
        out.append(TokenSpan(0, spans[-1].version))
    return tuple(out)


def token_versions(spans: Sequence[TokenSpan], n_tokens: int) -> list[int]:
    """Version of every response token, length `n_tokens`."""
    out: list[int] = []
    for i, span in enumerate(spans):
        end = spans[i + 1].first_token if i + 1 < len(spans) else n_tokens
        out.extend([span.version] * (end - span.first_token))
    return out
