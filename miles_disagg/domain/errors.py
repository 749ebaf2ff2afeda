"""Every error the system raises on purpose.

An error carries both sides of a disagreement as attributes, and its message says what to do.
Nothing here logs, retries or knows about HTTP; `replica.app` and `gateway.app` map these to statuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class MilesDisaggError(Exception):
    """Base of every error raised on purpose. Catch this at a process boundary, not inside."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by state, not by calling the constructor with the message: errors cross Ray's process boundaries."""
        return _restore, (type(self), self.args, self.__dict__.copy())


def _restore(kind: type[MilesDisaggError], args: tuple[Any, ...], state: dict[str, Any]) -> MilesDisaggError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigError(MilesDisaggError):
    """One or more configuration problems, all of them at once; each line names a flag and a remedy."""

    def __init__(self, problems: Sequence[str]):
        self.problems = tuple(problems)
        super().__init__("\n".join(f"  - {p}" for p in self.problems))


class DeadlineExceeded(MilesDisaggError):
    """A wait ran out. Names what was waited for, for how long, and what was seen instead."""

    def __init__(self, waited_for: str, seconds: float, detail: str = ""):
        self.waited_for, self.seconds, self.detail = waited_for, seconds, detail
        super().__init__(f"waited {seconds:.1f} s for {waited_for}" + (f": {detail}" if detail else ""))


# --- versions and the store -------------------------------------------------------------------


class InvalidVersionRef(MilesDisaggError):
    """A run id or version that cannot be parsed. Never treated as the base."""


class PointerConflict(MilesDisaggError):
    """The pointer is not where the writer believed it to be, or would move backwards."""

    def __init__(self, expected: object, actual: object, proposed: object, remedy: str = ""):
        self.expected, self.actual, self.proposed = expected, actual, proposed
        super().__init__(
            f"cannot move the version pointer to {proposed}: expected it at {expected}, found {actual}. "
            + (remedy or "Another publisher is writing to this store, or this one is out of date; stop one of them.")
        )


class ClaimConflict(MilesDisaggError):
    """A run id or publication directory is claimed by somebody else."""

    def __init__(self, where: str, claimed_by: str, wanted_by: str, remedy: str = ""):
        self.where, self.claimed_by, self.wanted_by = where, claimed_by, wanted_by
        super().__init__(
            f"{where} is claimed by {claimed_by}, {wanted_by} cannot have it. "
            + (remedy or "Use another --update-weight-disk-dir or --run-id, or resume that run.")
        )


class NotClaimed(MilesDisaggError):
    """The process that keeps a run's versions has no claim: none was made yet, or it was started anew."""


class VersionNotFound(MilesDisaggError):
    """A version that was asked for does not exist (its index was never written, or retention removed it)."""

    def __init__(self, version: object, where: str, detail: str = ""):
        self.version, self.where = version, where
        super().__init__(f"{version} does not exist in {where}" + (f": {detail}" if detail else ""))


class ChainBroken(MilesDisaggError):
    """A delta chain has a missing link and no anchor bridges it. Names the missing version."""

    def __init__(self, target: object, missing: object, detail: str = ""):
        self.target, self.missing = target, missing
        super().__init__(
            f"cannot build {target}: {missing} is missing"
            + (f" ({detail})" if detail else "")
            + ". Publish an anchor (--update-weight-anchor-interval) or reseed from a full version."
        )


class BaseMismatch(MilesDisaggError):
    """The base checkpoint here is not the one the run was started from."""

    def __init__(self, expected: str, actual: str, where: str):
        self.expected, self.actual, self.where = expected, actual, where
        super().__init__(
            f"the base checkpoint at {where} has digest {actual}, the run was started from {expected}. "
            "Give this host the run's own base checkpoint."
        )


class CheckpointError(MilesDisaggError):
    """A checkpoint, index, shard or payload that is malformed. Names the file and, where known, the tensor."""

    def __init__(self, message: str, *, file: str | None = None, tensor: str | None = None):
        self.file, self.tensor = file, tensor
        where = ", ".join(x for x in (f"file {file}" if file else "", f"tensor {tensor!r}" if tensor else "") if x)
        super().__init__(f"{message}" + (f" ({where})" if where else ""))


class ChecksumMismatch(CheckpointError):
    """Bytes do not have the digest they were published with."""

    def __init__(self, expected: str, actual: str, *, file: str | None = None, tensor: str | None = None):
        self.expected, self.actual = expected, actual
        super().__init__(f"checksum is {actual}, published as {expected}", file=file, tensor=tensor)


class NonFiniteWeights(MilesDisaggError):
    """NaN or Inf in weights about to be published. The last good version keeps serving."""

    def __init__(self, tensor: str, count: int):
        self.tensor, self.count = tensor, count
        super().__init__(f"{count} non-finite values in {tensor!r}: not published; the last good version keeps serving")


# --- engines ------------------------------------------------------------------------------------


class EngineError(MilesDisaggError):
    """An engine answered with an error. `status` is the HTTP status (0: no answer)."""

    def __init__(self, message: str, status: int = 0):
        self.status = status
        super().__init__(message)


class EngineUnavailable(EngineError):
    """The engine process is gone or does not answer; another replica may serve a retry."""


class EngineStartError(EngineError):
    """An engine did not come up. Carries the last lines of its log."""


class PortTaken(EngineStartError):
    """Another process listens on the port that an engine or a gateway was to have."""


class EngineMismatch(EngineError):
    """An engine that somebody else runs cannot be used by this run; every difference by name."""

    def __init__(self, url: str, problems: Sequence[str]):
        self.url, self.problems = url, tuple(problems)
        super().__init__(f"the engine at {url} does not fit this run: " + "; ".join(self.problems))


class WeightsNotLoaded(EngineError):
    """An engine has weights that its loader fills from no tensor of the checkpoint: it computes with chance values."""

    def __init__(self, engine: str, names: Sequence[str], checkpoint: str):
        self.names = tuple(names)
        what = f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
        super().__init__(
            f"{engine}: no tensor of {checkpoint} is loaded into the engine's {what}, so it computes with what "
            "happened to lie there; write the tensor into the checkpoint (an output head that is not tied in the "
            "engine, say), or use --activation reload if the model is meant to be so"
        )


class UpdateFailed(EngineError):
    """A weight update was refused by the engine or the process group; the engine serves what it served before."""


# --- requests -----------------------------------------------------------------------------------


class RequestError(MilesDisaggError):
    """Base of errors that a rollout client sees; `type` is the wire name in PROTOCOL.md section 2."""

    type = "RequestError"


class InvalidRequest(RequestError):
    """A malformed field; names it."""

    type = "InvalidRequest"


class InvalidConstraint(RequestError):
    """A malformed `weight_version`; names the field."""

    type = "InvalidConstraint"


class WeightVersionNotReady(RequestError):
    """No compatible replica yet; retry."""

    type = "WeightVersionNotReady"

    def __init__(self, requested: str, served: int | None, latest: int | None, retry_after: float = 1.0):
        self.requested, self.served, self.latest, self.retry_after = requested, served, latest, retry_after
        super().__init__(f"requested {requested}, served {served}, latest published {latest}: retry")


class WeightVersionGone(RequestError):
    """An exact version that can never be served again here; do not retry."""

    type = "WeightVersionGone"

    def __init__(self, requested: int, oldest: int | None):
        self.requested, self.oldest = requested, oldest
        super().__init__(f"version {requested} can never be served again here (oldest still reachable: {oldest})")


class Overloaded(RequestError):
    """Admission is full; retry after `retry_after` seconds."""

    type = "Overloaded"

    def __init__(self, message: str, retry_after: float = 1.0):
        self.retry_after = retry_after
        super().__init__(message)


# --- rollout and training -----------------------------------------------------------------------


class PlacementError(MilesDisaggError):
    """Resources that were asked for cannot be had. Prints wanted against available."""


class RewardError(MilesDisaggError):
    """A reward function raised, timed out or returned something that is no finite number."""


class PublicationFailed(MilesDisaggError):
    """A version could not be published; nothing moved."""


class PromptDataError(MilesDisaggError):
    """Prompt data that cannot be used. Names the file and the line (1-based; for Parquet the row)."""

    def __init__(self, message: str, *, file: str, line: int | None = None):
        self.file, self.line = file, line
        super().__init__(f"{file}" + (f", line {line}" if line is not None else "") + f": {message}")


class SampleRejected(MilesDisaggError):
    """A generation that cannot become a sample; `reason` is the short name it is counted under."""

    def __init__(self, reason: str, detail: str = ""):
        self.reason, self.detail = reason, detail
        super().__init__(f"sample rejected ({reason})" + (f": {detail}" if detail else ""))
