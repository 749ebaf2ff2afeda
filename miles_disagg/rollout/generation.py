"""One group of samples: generate each under a constraint, score it, try again what failed.

Which groups are started, and when, is `producer`; how one request is made is `pool`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections import Counter

import xxhash

from miles_disagg.domain.errors import DeadlineExceeded, RequestError, RewardError, SampleRejected, WeightVersionGone
from miles_disagg.domain.samples import Prompt, Sample, SampleGroup
from miles_disagg.domain.versions import Constraint
from miles_disagg.prompts.base import Reward
from miles_disagg.rollout.base import GenerationClient, RolloutOptions, SamplingOptions
from miles_disagg.rollout.continuation import only_newest
from miles_disagg.rollout.slots import Slots


class GroupFailed(Exception):
    """A group could not be completed; `reason` is what it is counted under."""

    def __init__(self, reason: str, detail: str):
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason}: {detail}")


@dataclasses.dataclass
class _Held:
    """Slots acquired for a group that none of its samples uses yet."""

    slots: int


class GroupGenerator:
    """Makes scored groups. Slots bound the samples that are with an engine at any moment."""

    def __init__(
        self,
        client: GenerationClient,
        reward: Reward,
        options: RolloutOptions,
        sampling: SamplingOptions,
        slots: Slots,
        run_id: str,
    ):
        self._client, self._reward, self._options, self._sampling = client, reward, options, sampling
        self._slots = slots
        # A request id names this incarnation too: after a restart the gateway must not answer with an old result.
        self._rid_prefix = f"{run_id}-{uuid.uuid4().hex[:8]}"
        self.rejected: Counter[str] = Counter()

    async def group(self, prompt: Prompt, attempt: int, constraint: Constraint, slots_held: int) -> SampleGroup:
        """All samples of one prompt, scored. The caller acquired `slots_held` slots for it; they are released here.

        GroupFailed when a sample failed for good and the options do not let the group shrink.
        """
        group_id = f"{prompt.key}#{attempt}"
        n = self._options.n_samples_per_prompt
        held = _Held(slots_held)
        tasks = [asyncio.create_task(self._sample(prompt, group_id, i, constraint, held)) for i in range(n)]
        shrink = self._options.failed_sample == "shrink_group"
        try:
            results = await asyncio.gather(*tasks, return_exceptions=shrink)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        finally:
            self._slots.release(held.slots)
        samples = [r for r in results if isinstance(r, Sample)]
        failures = [r for r in results if isinstance(r, BaseException)]
        for failure in failures:
            if not isinstance(failure, GroupFailed):
                raise failure
        if len(samples) < min(2, n):  # one sample alone has no advantage over anything
            failure = failures[0]
            assert isinstance(failure, GroupFailed)
            raise failure
        return SampleGroup(group_id, prompt, tuple(samples))

    async def _sample(self, prompt: Prompt, group_id: str, index: int, constraint: Constraint, held: _Held) -> Sample:
        sample_id, last = f"{group_id}/{index}", GroupFailed("never_tried", "")
        for trial in range(self._options.sample_attempts):
            if held.slots:
                held.slots -= 1
            else:
                await self._slots.acquire()
            try:
                try:
                    sample = await self._generate(prompt, group_id, sample_id, trial, constraint)
                    if self._options.mask_old:
                        sample = only_newest(sample)
                finally:
                    self._slots.release()
                begin = time.monotonic()
                reward = await self._reward(sample)
            except SampleRejected as error:
                last = GroupFailed(error.reason, f"{sample_id}: {error.detail}")
            except RewardError as error:
                last = GroupFailed("reward_error", str(error))
            except DeadlineExceeded as error:
                last = GroupFailed("timeout", str(error))
            except RequestError as error:
                self.rejected[error.type] += 1
                raise GroupFailed("gone" if isinstance(error, WeightVersionGone) else "refused", str(error)) from error
            else:
                timings = {**sample.timings, "reward": time.monotonic() - begin}
                return dataclasses.replace(sample, reward=reward, timings=timings)
            self.rejected[last.reason] += 1
        raise last

    async def _generate(
        self, prompt: Prompt, group_id: str, sample_id: str, trial: int, constraint: Constraint
    ) -> Sample:
        seed = self._sampling.seed
        if seed is not None:
            seed = xxhash.xxh3_64_intdigest(f"{seed}:{sample_id}:{trial}".encode()) & 0x7FFFFFFF
        return await self._client.generate(
            prompt,
            self._sampling,
            constraint,
            sample_id=sample_id,
            group_id=group_id,
            rid=f"{self._rid_prefix}-{sample_id}-{trial}",
            session_id=None,
            seed=seed,
        )
