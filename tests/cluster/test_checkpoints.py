"""Checkpoints on disk: complete or absent, verified, and bound to the flags they were made with."""

import json
from pathlib import Path

import pytest

from miles_disagg.cluster import checkpoints, resume
from miles_disagg.cluster.checkpoints import RunState
from miles_disagg.config.flags import parse_run, save_config
from miles_disagg.config.resolve import resolve
from miles_disagg.domain.errors import CheckpointError, ConfigError

IDENTITY = {"--hf-checkpoint": "abc", "--train-dtype": "bf16", "--use-distributed-optimizer": False}


def save(run_dir: Path, step: int, keep: int | None = None, **books: object) -> Path:
    partial = checkpoints.begin(run_dir, step)
    (partial / "trainer").mkdir()
    (partial / "trainer" / "weights.distcp").write_bytes(bytes(range(256)) * step)
    state = RunState("run", step, step + 1, IDENTITY, ((0, 0.25),), books)
    return checkpoints.finish(run_dir, state, keep)


def test_a_checkpoint_comes_back_as_it_was_saved(tmp_path):
    path = save(tmp_path, 3, ledger={"trained": 12}, logprob=-0.1234567890123456789)
    state = checkpoints.read(path)
    assert (state.run_id, state.step, state.version, state.accuracies) == ("run", 3, 4, ((0, 0.25),))
    assert state.producer == {"ledger": {"trained": 12}, "logprob": -0.1234567890123456789}


def test_a_checkpoint_that_was_not_finished_is_not_seen_and_is_removed(tmp_path):
    save(tmp_path, 1)
    partial = checkpoints.begin(tmp_path, 2)
    (partial / "half").write_text("x")
    assert [p.name for p in checkpoints.complete(tmp_path)] == ["step_000001"]
    checkpoints.remove_partial(tmp_path)
    assert not partial.exists()
    with pytest.raises(FileExistsError, match="never overwritten"):
        checkpoints.begin(tmp_path, 1)


def test_the_newest_checkpoints_are_kept_beyond_six_digits_too(tmp_path):
    for step in (2, 999_999, 1_000_000):
        checkpoints.begin(tmp_path, step)
        checkpoints.finish(tmp_path, RunState("run", step, step, IDENTITY), keep=2)
    assert [p.name for p in checkpoints.complete(tmp_path)] == ["step_999999", "step_1000000"]


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "state"])
def test_a_damaged_checkpoint_is_refused_by_the_name_of_the_file(tmp_path, damage):
    path = save(tmp_path, 4)
    file = path / ("state.json" if damage == "state" else "trainer/weights.distcp")
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    if damage == "flip":
        file.write_bytes(raw)
    elif damage == "remove":
        file.unlink()
    else:
        file.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(CheckpointError, match=file.name):
        checkpoints.read(path)


def test_flags_that_a_checkpoint_is_bound_to_are_named_with_both_values(tmp_path):
    state = checkpoints.read(save(tmp_path, 1))
    resume.check_identity(state, IDENTITY)
    with pytest.raises(ConfigError) as caught:
        resume.check_identity(state, {**IDENTITY, "--train-dtype": "fp32"})
    assert "--train-dtype is fp32, the checkpoint was made with bf16" in str(caught.value)


def test_the_lineage_file_remembers_the_owner_and_the_highest_number(tmp_path):
    lineage = resume.Lineage(tmp_path)
    lineage.claimed("token")
    lineage.given_out(7)
    lineage.given_out(5)
    again = resume.Lineage(tmp_path)
    assert (again.owner, again.version) == ("token", 7)


def start(run_dir: Path, *flags: str) -> None:
    """What a first start leaves."""
    run_dir.mkdir(parents=True)
    argv = ["--hf-checkpoint", "model", "--num-rollout", "4", "--task", "addition", "--run-dir", str(run_dir), *flags]
    save_config(resolve(parse_run(argv), gpus=0), run_dir / "config.yaml")


def test_a_continued_run_has_its_saved_flags_below_the_new_ones(tmp_path):
    start(tmp_path / "run", "--lr", "1e-4", "--run-id", "mine")
    config = parse_run(["--load", str(tmp_path / "run"), "--num-rollout", "9"])
    assert (config.output.run_id, config.optimizer.lr, config.num_rollout) == ("mine", 1e-4, 9)
    assert config.run_dir == tmp_path / "run"
    auto = parse_run(["--resume", "auto", "--run-dir", str(tmp_path / "run"), "--lr", "1e-3"])
    assert (auto.output.run_id, auto.optimizer.lr, auto.output.load) == ("mine", 1e-3, str(tmp_path / "run"))
    new = parse_run(["--resume", "auto", "--run-dir", str(tmp_path / "other"), "--num-rollout", "4"])
    assert new.output.load is None


def test_what_cannot_be_continued_is_said_before_anything_starts(tmp_path):
    start(tmp_path / "run", "--run-id", "mine")
    loaded = parse_run(["--load", str(tmp_path / "run")])
    assert "there is no complete checkpoint" in next(resume.problems(loaded))
    assert not list(resume.problems(parse_run(["--resume", "auto", "--run-dir", str(tmp_path / "run")])))
    save(tmp_path / "run", 4)
    assert "the run has done 4 steps; raise it" in next(resume.problems(loaded))
    assert not list(resume.problems(parse_run(["--load", str(tmp_path / "run"), "--num-rollout", "5"])))


def test_metrics_of_steps_that_are_done_again_are_set_aside(tmp_path):
    start(tmp_path / "run")
    save(tmp_path / "run", 2)
    rows = "".join(json.dumps({"step": i}) + "\n" for i in range(4))
    (tmp_path / "run" / "metrics.jsonl").write_text(rows + '{"step": 4, "tr')
    config = parse_run(["--load", str(tmp_path / "run"), "--train-dtype", "bf16"])
    found = resume.find(config, "abc")
    assert found is not None
    assert found.step == 2
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == '{"step": 0}\n{"step": 1}\n'
    assert len((tmp_path / "run" / "metrics.superseded.jsonl").read_text().splitlines()) == 3
