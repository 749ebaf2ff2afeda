"""From flags and YAML files to a configuration, and back."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_disagg.config.flags import closest, flag, flag_names, load_files, parse_run, section_of, to_yaml
from miles_disagg.config.resolve import resolve
from miles_disagg.config.run import RunConfig
from miles_disagg.domain.errors import ConfigError


def write(tmp_path: Path, text: str, name: str = "run.yaml") -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def test_a_flag_wins_over_a_file_and_a_file_over_the_default(tmp_path: Path):
    file = write(tmp_path, "rollout:\n  rollout-batch-size: 5\n  num-rollout: 7\nlr: 1e-4\n")
    config = parse_run(["--config", file, "--num-rollout", "9"])
    assert config.rollout.rollout_batch_size == 5
    assert config.rollout.num_rollout == 9
    assert config.optimizer.lr == 1e-4
    assert config.rollout.n_samples_per_prompt == RunConfig().rollout.n_samples_per_prompt


def test_a_flag_can_set_a_files_value_back_to_its_default(tmp_path: Path):
    file = write(tmp_path, "num-rollout: 7\nuse-tis: true\nrollout-batch-size: 5\n")
    config = parse_run(["--config", file, "--no-use-tis", "--rollout-batch-size", "32"])
    assert not config.loss.use_tis
    assert config.rollout.rollout_batch_size == 32


def test_a_later_file_wins_over_an_earlier_one(tmp_path: Path):
    first = write(tmp_path, "num-rollout: 7\nlr: 1.0e-4\n", "a.yaml")
    second = write(tmp_path, "num-rollout: 8\n", "b.yaml")
    config = parse_run(["--config", first, f"--config={second}"])
    assert (config.rollout.num_rollout, config.optimizer.lr) == (8, 1e-4)


def test_keys_may_be_flat_or_grouped_and_written_with_dashes_or_underscores(tmp_path: Path):
    grouped = load_files([write(tmp_path, "rollout:\n  rollout_batch_size: 5\n", "a.yaml")])
    assert grouped == load_files([write(tmp_path, "rollout-batch-size: 5\n", "b.yaml")])


def test_all_mistakes_of_all_files_are_reported_at_once_with_file_flag_and_suggestion(tmp_path: Path):
    first = write(tmp_path, "rollout:\n  rollout-batch-sise: 5\nnonsense: 1\n", "a.yaml")
    second = write(tmp_path, "lr: fast\ntrain-dtype: fp8\n", "b.yaml")
    with pytest.raises(ConfigError) as caught:
        load_files([first, second])
    text = str(caught.value)
    assert "a.yaml: unknown key rollout-batch-sise; perhaps you meant rollout_batch_size" in text
    assert "a.yaml: unknown key nonsense" in text
    assert "b.yaml: --lr:" in text
    assert "b.yaml: --train-dtype:" in text
    assert "'fp8'" in text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "not valid YAML"),
        ("- a\n- b\n", "must be a mapping"),
        ("lr: 1\nlr: 2\n", "lr twice"),
        ("lr: 1\noptimizer:\n  lr: 2\n", "lr is given twice"),
    ],
)
def test_a_malformed_file_is_refused_by_name(tmp_path: Path, text: str, says: str):
    with pytest.raises(ConfigError, match=says):
        load_files([write(tmp_path, text)])


def test_a_missing_file_and_a_config_flag_without_file_are_refused():
    with pytest.raises(ConfigError, match=r"--config /nowhere\.yaml: No such file"):
        parse_run(["--config", "/nowhere.yaml"])
    with pytest.raises(ConfigError, match="needs the path"):
        parse_run(["--config"])
    with pytest.raises(ConfigError, match="needs the path"):
        parse_run(["--config", "--dry-run"])


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--rollout-batch-sise", "3"], "--rollout-batch-size"),
        (["--lr", "fast"], "--lr"),
        (["--train-dtype", "fp8"], "--train-dtype"),
    ],
)
def test_a_bad_flag_exits_with_2_and_a_hint(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        parse_run(argv)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_server_arguments_pass_through_from_flags_and_files(tmp_path: Path):
    file = write(tmp_path, "sglang-mem-fraction-static: 0.8\nsglang_disable_radix_cache: true\nsglang-x: false\n")
    argv = ["--config", file, "--sglang-mem-fraction-static", "0.5", "--sglang-stop", "a", "-1", "--num-rollout", "3"]
    config = parse_run([*argv, "--sglang-schedule-policy=fcfs", "--sglang-python", "/usr/bin/python3"])
    assert config.engines.sglang_args == {
        "mem-fraction-static": ("0.5",),
        "disable-radix-cache": (),
        "stop": ("a", "-1"),
        "schedule-policy": ("fcfs",),
    }
    assert config.engines.sglang_python == "/usr/bin/python3"
    assert config.rollout.num_rollout == 3
    assert config.engines.sglang_argv()[:3] == ["--mem-fraction-static", "0.5", "--disable-radix-cache"]


def test_the_saved_configuration_reads_back_equal(tmp_path: Path):
    argv = ["--num-rollout", "3", "--rollout-external", "--rollout-external-engine-addrs", "a:1", "b:2"]
    config = resolve(parse_run([*argv, "--sglang-tp", "2", "--dry-run"]), gpus=0)
    again = load_files([write(tmp_path, to_yaml(config))])
    assert again == config.replace(dry_run=False)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 10**6), st.floats(1e-9, 1), st.lists(st.text(max_size=9), max_size=3), st.booleans())
def test_any_values_survive_saving(tmp_path_factory, batch: int, lr: float, stops: list[str], tis: bool):
    config = RunConfig().replace(rollout_batch_size=batch, lr=lr, rollout_stop=stops, use_tis=tis)
    path = tmp_path_factory.getbasetemp() / "survives.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load_files([str(path)]) == config


def test_every_flag_is_described():
    for field, section in section_of().items():
        info = type(getattr(RunConfig(), section)).model_fields[field]
        assert info.description, f"{flag(field)} has no help text"
        assert info.description[0].isupper() or info.description.split(":")[0].islower(), info.description


def test_miles_users_find_their_flags():
    wanted = """--hf-checkpoint --prompt-data --rollout-batch-size --n-samples-per-prompt --global-batch-size
    --num-rollout --actor-num-nodes --actor-num-gpus-per-node --rollout-num-gpus --rollout-num-gpus-per-engine
    --update-weights-interval --update-weight-transfer-mode --update-weight-disk-dir
    --update-weight-local-checkpoint-dir --max-weight-staleness --async-max-concurrent-samples
    --async-data-buffer-capacity-factor --pause-generation-mode"""
    assert set(wanted.split()) <= set(flag_names())


def test_configurations_are_immutable_and_replace_names_unknown_flags():
    config = RunConfig()
    with pytest.raises(ValueError, match="frozen"):
        config.rollout.rollout_batch_size = 3  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(KeyError, match="nonsense"):
        config.replace(nonsense=1)


def test_closest_suggests_only_what_is_close():
    assert closest("broadcost", ["broadcast", "disk"]) == "; perhaps you meant broadcast"
    assert closest("zzz", ["broadcast", "disk"]) == ""
