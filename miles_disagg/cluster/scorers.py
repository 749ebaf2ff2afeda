"""The servers that score a run's sampled tokens: teachers of a distillation and the reference of the KL term."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_disagg.config.resolve import is_url
from miles_disagg.config.run import RunConfig
from miles_disagg.rollout.teacher import Teachers, TeacherSpec


def teacher_spec(config: RunConfig) -> TeacherSpec | None:
    """The teachers of an on-policy distillation, None without --use-opd."""
    section = config.distillation
    if not section.use_opd:
        return None
    return TeacherSpec(dict(section.teachers), section.opd_teacher_key, section.opd_timeout)


def reference_spec(config: RunConfig, served: Mapping[str, tuple[str, ...]]) -> TeacherSpec | None:
    """The server of --kl-reference, None without one, or where it is not in `served` (URLs of frozen models by name)
    and no URL."""
    name = config.loss.kl_reference
    if name is None:
        return None
    urls = (name.rstrip("/").removesuffix("/generate"),) if is_url(name) else served.get(name, ())
    if not urls:
        return None
    return TeacherSpec(
        {str(i): url for i, url in enumerate(urls)},
        None,
        config.loss.kl_reference_timeout,
        role="reference",
        flag="--kl-reference",
        timeout_flag="--kl-reference-timeout",
    )


async def vocabulary_problems(tokenizer: Any, *asked: TeacherSpec | None) -> list[str]:
    """Servers that do not answer, or that have another vocabulary than the policy's tokenizer."""
    problems: list[str] = []
    for spec in asked:
        if spec is not None:
            async with Teachers(spec) as scorers:
                problems += await scorers.check(tokenizer)
    return problems
