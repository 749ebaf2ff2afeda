"""Groups of samples as JSON and back, exactly (floats keep every bit). Where the text is stored is the caller's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from miles_disagg.domain.samples import Prompt, Sample, SampleGroup
from miles_disagg.domain.versions import TokenSpan


def prompt_to_json(prompt: Prompt) -> dict[str, Any]:
    """A prompt as a JSON-able dict."""
    return {f.name: getattr(prompt, f.name) for f in dataclasses.fields(prompt)}


def prompt_from_json(data: Mapping[str, Any]) -> Prompt:
    """Inverse of `prompt_to_json`."""
    return Prompt(**{**data, "tokens": tuple(data["tokens"])})


def sample_to_json(sample: Sample) -> dict[str, Any]:
    """A sample as a JSON-able dict, without its prompt (`SampleGroup` holds that once)."""
    data = {f.name: getattr(sample, f.name) for f in dataclasses.fields(sample) if f.name != "prompt"}
    data["spans"] = [[s.first_token, s.version] for s in sample.spans]
    data["timings"], data["metadata"] = dict(sample.timings), dict(sample.metadata)
    return data


def sample_from_json(data: Mapping[str, Any], prompt: Prompt) -> Sample:
    """Inverse of `sample_to_json`."""
    mask = data["loss_mask"]
    scored = {name: data.get(name) for name in ("teacher_logprobs", "reference_logprobs")}
    return Sample(
        **{
            **data,
            "prompt": prompt,
            "tokens": tuple(data["tokens"]),
            "logprobs": tuple(data["logprobs"]),
            "spans": tuple(TokenSpan(first, version) for first, version in data["spans"]),
            "loss_mask": None if mask is None else tuple(mask),
            **{name: None if values is None else tuple(values) for name, values in scored.items()},
        }
    )


def group_to_json(group: SampleGroup) -> dict[str, Any]:
    """A group as a JSON-able dict."""
    return {
        "group_id": group.group_id,
        "prompt": prompt_to_json(group.prompt),
        "samples": [sample_to_json(s) for s in group.samples],
    }


def group_from_json(data: Mapping[str, Any]) -> SampleGroup:
    """Inverse of `group_to_json`."""
    prompt = prompt_from_json(data["prompt"])
    return SampleGroup(data["group_id"], prompt, tuple(sample_from_json(s, prompt) for s in data["samples"]))
