"""Evaluation by a function of the user's, on a published version exported as a Hugging Face checkpoint.

The engines of the run are not asked: the version is built from the store beside training, like on any rollout host.
When to evaluate, and where the result goes, is `evaluation`.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from miles_disagg.domain.errors import DeadlineExceeded, MilesDisaggError
from miles_disagg.domain.versions import Constraint, VersionRef
from miles_disagg.store.base import open_store
from miles_disagg.store.checkout import check_out
from miles_disagg.store.versions import VersionStore

EvalFunction = Callable[[Path, int], float]
"""What --eval-function-path names: called in a thread with checkpoint directory and version; accuracy in [0, 1]."""


class ExternalEvaluation:
    """Evaluates versions of `run_id` in the store at `store_url`. base: the run's base checkpoint on this host.

    scratch: where checkpoints are built; each is removed after its evaluation.
    """

    def __init__(self, function: EvalFunction, store_url: str, run_id: str, base: Path, scratch: Path):
        self._function, self._url, self._run_id, self._base, self._scratch = function, store_url, run_id, base, scratch
        self._name = getattr(function, "__qualname__", type(function).__name__)

    async def __call__(self, constraint: Constraint, timeout: float) -> dict[str, float]:
        """Metrics of the exact version that `constraint` names.

        Waits until it is published; DeadlineExceeded after `timeout` seconds in all, a MilesDisaggError when the
        version is gone or the function raised, with its name.
        """
        version, begun = constraint.exact_version, time.monotonic()
        if version is None:
            raise ValueError(f"an external evaluation needs an exact version, not {constraint}")
        ref = VersionRef(self._run_id, version)
        try:
            async with asyncio.timeout(timeout):
                accuracy = await asyncio.to_thread(self._work, ref, timeout)
        except TimeoutError:
            raise DeadlineExceeded(f"{self._name} to evaluate {ref}", timeout, "see --rollout-wait-timeout") from None
        seconds = time.monotonic() - begun
        return {"eval/accuracy": accuracy, "eval/weight_version": float(version), "eval/seconds": seconds}

    def _work(self, ref: VersionRef, timeout: float) -> float:
        store = VersionStore(open_store(self._url))
        self._wait_published(store, ref, timeout)
        self._scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="eval-", dir=self._scratch) as directory:
            checkpoint = Path(directory) / "checkpoint"
            check_out(store, ref, self._base, checkpoint)
            try:
                value = float(self._function(checkpoint, ref.version))
            except Exception as error:
                what = f"--eval-function-path {self._name} raised {type(error).__name__} for {ref}: {error}"
                raise MilesDisaggError(what) from error
        if not math.isfinite(value):
            raise MilesDisaggError(f"--eval-function-path {self._name} returned {value} for {ref}: not finite")
        return value

    def _wait_published(self, store: VersionStore, ref: VersionRef, timeout: float) -> None:
        deadline, latest = time.monotonic() + timeout, store.latest()
        while latest is None or latest.run_id != ref.run_id or latest < ref:
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(f"{ref} to be published", timeout, f"newest is {latest}")
            latest = store.wait_newer(latest, left) or latest
