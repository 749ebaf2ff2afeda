"""Samples on disk say who wrote what."""

import json

from miles_disagg.domain.versions import TokenSpan
from miles_disagg.observe.sample_log import SampleLog
from tests.fakes.samples import make_group


def test_each_sample_is_a_line_with_its_reward_and_spans(tmp_path):
    group = make_group()
    SampleLog(tmp_path / "samples").write(4, [group], trainer_version=9)
    rows = [json.loads(line) for line in (tmp_path / "samples" / "step_000005.jsonl").read_text().splitlines()]
    assert [row["sample_id"] for row in rows] == [sample.sample_id for sample in group.samples]
    assert [row["reward"] for row in rows] == group.rewards
    spans = [tuple(TokenSpan(*span) for span in row["weight_version_spans"]) for row in rows]
    assert spans == [sample.spans for sample in group.samples]
    assert [row["lag"] for row in rows] == [sample.lag(9) for sample in group.samples]
