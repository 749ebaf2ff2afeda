"""Metrics, trackers, events and the console."""

import json

import pytest

from miles_disagg.observe.console import RunConsole, Summary, waits_for
from miles_disagg.observe.events import EventLog, Timeline
from miles_disagg.observe.metrics import METRICS, UndeclaredMetric
from miles_disagg.observe.trackers import JsonlTracker, TensorBoardTracker, Trackers


def test_an_undeclared_metric_is_refused_by_name(tmp_path):
    trackers = Trackers([JsonlTracker(tmp_path / "metrics.jsonl")])
    with pytest.raises(UndeclaredMetric, match="perf/typo"):
        trackers.log(0, 0, {"perf/typo": 1.0})


def test_metric_names_are_legal_and_distinct_on_the_endpoint():
    names = [m.prometheus_name for m in METRICS.values()]
    assert len(set(names)) == len(names)
    assert METRICS["perf/step_seconds"].prometheus_name == "miles_perf_step_seconds"


def test_each_step_is_one_strict_json_line(tmp_path):
    trackers = Trackers([JsonlTracker(tmp_path / "metrics.jsonl"), TensorBoardTracker(tmp_path / "tb")])
    trackers.log(0, 1, {"train/loss": 0.5, "train/kl": float("nan")})
    trackers.log(1, 2, {"train/loss": 0.25})
    trackers.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(r["step"], r["weight_version"], r["train/loss"]) for r in rows] == [(0, 1, 0.5), (1, 2, 0.25)]
    assert rows[0]["train/kl"] is None
    assert list((tmp_path / "tb").iterdir())


def test_events_survive_an_exception_and_are_written_once(tmp_path):
    timeline = Timeline("trainer-0")
    with pytest.raises(ValueError), timeline.span("step", version=3):
        raise ValueError
    log = EventLog(tmp_path / "events.jsonl")
    log.write(timeline.drain())
    log.write(timeline.drain())
    log.close()
    (event,) = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert event["name"] == "step"
    assert event["version"] == 3
    assert event["begin"] <= event["end"]


def test_what_a_step_waited_for_is_said_in_words():
    assert waits_for({"perf/step_seconds": 2.0, "perf/wait_for_rollout_seconds": 1.0}) == "generation 50%"
    assert "nothing" in waits_for({"perf/step_seconds": 2.0})


def test_a_step_is_one_line_when_there_is_no_terminal(capsys):
    console = RunConsole("run", 10)
    console.begin()
    console.step(0, 1, {"rollout/reward_mean": 0.5, "perf/step_seconds": 1.0})
    console.end()
    assert "step 1/10 v1" in capsys.readouterr().out


LEDGER = {"generated": 10, "trained": 8, "queued": 1, "dropped": {"stale": 1}, "in_flight": 0}


def test_the_summary_says_what_happened_and_where_to_look(tmp_path):
    summary = Summary("completed", 5, 30.0, 5, 0.3, 0.9, LEDGER, tmp_path)
    text = " ".join(summary.sentences())
    assert "skipped" not in text
    assert "from 0.30 to 0.90" in text
    assert str(tmp_path) in text
    assert "generated 10 = trained 8 + queued 1 + dropped 1 (stale 1) + in flight 0" in text
    assert set(summary.to_json()) >= {
        "status",
        "steps",
        "eval/accuracy_first",
        "eval/accuracy_last",
        "seconds",
        "final_version",
        "ledger",
    }
