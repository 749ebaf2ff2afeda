"""The command line as a user meets it: dry runs, and bad input that is answered before anything starts."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from miles_disagg import cli
from miles_disagg.domain.errors import MilesDisaggError
from miles_disagg.store.base import open_store
from miles_disagg.store.versions import VersionStore
from tests.fakes.checkpoints import EXPERTS, tensor_shapes, write_safetensors, write_tiny_checkpoint, write_tokenizer

ROOT = Path(__file__).parents[1]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path / "model")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path, [{"input": f"{n}+{n}=", "label": str(2 * n)} for n in range(8)])


def write_prompts(tmp_path: Path, rows: list[dict] | list[str]) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def dry_run(model: Path, prompts: Path, *flags: str) -> int:
    argv = ["train", "--dry-run", "--hf-checkpoint", str(model), "--prompt-data", str(prompts), "--label-key", "label"]
    argv += ["--rm-type", "exact", "--num-rollout", "2", "--rollout-max-response-len", "8"]
    return cli.main([*argv, "--run-dir", str(model.parent / "run"), *flags])


def refused(capsys: pytest.CaptureFixture[str], status: int) -> str:
    out = capsys.readouterr()
    assert status == 2
    assert "Traceback" not in out.err
    assert out.out == ""
    return out.err


def test_a_dry_run_prints_the_placement_and_leaves_nothing_behind(model: Path, prompts: Path, capsys):
    before = sorted(model.parent.rglob("*"))
    assert dry_run(model, prompts, "--num-rollout-engines", "2", "--trainer-device", "cpu") == 0
    out = capsys.readouterr().out
    assert "Nothing was started" in out
    assert "trainer: 1 rank(s) in 1 placement group" in out
    assert "engine: 2 engine(s) in 2 placement groups" in out
    assert sorted(model.parent.rglob("*")) == before


def test_all_problems_of_files_and_flags_come_together(model: Path, tmp_path: Path, capsys):
    (model / "model.safetensors").unlink()
    err = refused(capsys, dry_run(model, tmp_path / "none.jsonl", "--lr", "0", "--tensor-model-parallel-size", "4"))
    assert "--lr is 0" in err
    assert "model.safetensors" in err
    assert "--tensor-model-parallel-size 4 does not divide the model's num_key_value_heads 2" in err


def test_a_truncated_shard_is_named(model: Path, prompts: Path, capsys):
    shard = model / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4])
    assert "file model.safetensors" in refused(capsys, dry_run(model, prompts))


def test_a_missing_shard_is_named(model: Path, prompts: Path, capsys):
    names = list(tensor_shapes(json.loads((model / "config.json").read_text())))
    files = dict.fromkeys(names, "model-00001-of-00002.safetensors") | {names[-1]: "model-00002-of-00002.safetensors"}
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    assert "model-00002-of-00002.safetensors" in refused(capsys, dry_run(model, prompts))


def test_an_unknown_architecture_is_named_with_those_that_work(tmp_path: Path, prompts: Path, capsys):
    model = write_tiny_checkpoint(tmp_path / "bert", architectures=["BertForMaskedLM"])
    err = refused(capsys, dry_run(model, prompts))
    assert "BertForMaskedLM" in err
    assert "Qwen3ForCausalLM" in err


def test_a_tokenizer_of_another_model_is_refused(model: Path, prompts: Path, capsys):
    write_tokenizer(model, "0123456789+=abcdefgh")
    assert "the tokenizer produces ids up to 21, the model's vocabulary has 16 rows" in refused(
        capsys, dry_run(model, prompts)
    )


def test_a_missing_tokenizer_is_refused(model: Path, prompts: Path, capsys):
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").unlink()
    assert "there is no tokenizer (tokenizer.json or" in refused(capsys, dry_run(model, prompts))


def test_an_embedding_that_is_not_the_vocabularys_size_is_refused(model: Path, prompts: Path, capsys):
    shapes = tensor_shapes(json.loads((model / "config.json").read_text()))
    write_safetensors(model / "model.safetensors", shapes | {"model.embed_tokens.weight": [12, 8]})
    assert "model.embed_tokens.weight has shape [12, 8]" in refused(capsys, dry_run(model, prompts))


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (['{"input": "1+1=", "label": "2"}', '{"input": '], "line 2"),
        ([{"question": "1+1=", "label": "2"}], "set --input-key"),
        ([{"input": "1+1="}], "set --label-key"),
        ([{"input": "1" * 100, "label": "2"}], "the context leaves room for 56"),
        ([], "no usable prompt"),
    ],
)
def test_bad_prompts_are_refused_by_line_and_remedy(model: Path, tmp_path: Path, rows: list, says: str, capsys):
    err = refused(capsys, dry_run(model, write_prompts(tmp_path, rows)))
    assert "--prompt-data" in err
    assert says in err


def test_long_prompts_can_be_skipped_instead(model: Path, tmp_path: Path, capsys):
    rows = [{"input": "1" * 100, "label": "2"}, {"input": "1+1=", "label": "2"}]
    assert dry_run(model, write_prompts(tmp_path, rows), "--long-prompts", "skip") == 0


def test_a_tied_mixture_is_refused_for_sglang_which_would_not_fill_its_head(tmp_path: Path, prompts: Path, capsys):
    tied = write_tiny_checkpoint(tmp_path / "tied", **EXPERTS)
    assert dry_run(tied, prompts) == 0
    capsys.readouterr()
    err = refused(capsys, dry_run(tied, prompts, "--rollout-engine", "sglang"))
    assert "tie_word_embeddings with experts: SGLang's Qwen3MoeForCausalLM has an output head of its own" in err
    assert "add lm_head.weight" in err


def test_a_context_without_room_for_a_prompt_is_refused(model: Path, prompts: Path, capsys):
    err = refused(capsys, dry_run(model, prompts, "--rollout-max-response-len", "64"))
    assert "--rollout-max-response-len 64 leaves no room for a prompt in the model's 64 positions" in err


def test_bad_evaluation_files_tasks_and_rewards_are_named(model: Path, prompts: Path, capsys):
    err = refused(capsys, dry_run(model, prompts, "--eval-prompt-data", "held", "no.jsonl", "--eval-interval", "2"))
    assert "--eval-prompt-data held: no.jsonl: no such file" in err
    argv = ["train", "--dry-run", "--hf-checkpoint", str(model), "--num-rollout", "2"]
    assert "--task nonsense" in refused(capsys, cli.main([*argv, "--task", "nonsense"]))
    argv += ["--prompt-data", str(prompts), "--custom-rm-path", "nowhere.reward"]
    assert "--custom-rm-path nowhere.reward" in refused(capsys, cli.main(argv))


def test_plugged_in_paths_and_teachers_that_lead_nowhere_are_named(model: Path, prompts: Path, capsys):
    flags = ("--custom-advantage-function-path", "nowhere.f", "--custom-loss-function-path", "examples.loss.g")
    err = refused(capsys, dry_run(model, prompts, *flags, "--custom-async-data-buffer-path", "examples.buffer.B"))
    for name in ("--custom-advantage-function-path nowhere.f", "--custom-loss-function-path examples.loss.g"):
        assert name in err
    assert "--custom-async-data-buffer-path examples.buffer.B" in err
    err = refused(capsys, dry_run(model, prompts, "--use-opd", "--opd-teacher-urls", "http://127.0.0.1:9"))
    assert "--opd-teacher-urls http://127.0.0.1:9: " in err


def test_a_publication_directory_in_use_is_refused_until_its_run_ends(model: Path, prompts: Path, capsys):
    root = model.parent / "weights"
    other = VersionStore(open_store(str(root)))
    other.claim("other", base_digest="digest")
    flags = ("--update-weight-transfer-mode", "disk-delta", "--update-weight-disk-dir", str(root))
    assert f"--update-weight-disk-dir {root} is in use by run other" in refused(capsys, dry_run(model, prompts, *flags))
    other.release()
    assert dry_run(model, prompts, *flags) == 0


def test_a_misspelt_command_is_suggested_and_every_listed_command_exists(capsys):
    assert cli.main(["trian"]) == 2
    assert "perhaps you meant train" in capsys.readouterr().err
    assert cli.main(["--help"]) == 0
    listed = capsys.readouterr().out
    for name in cli.COMMANDS:
        assert name in listed
        assert name == "train" or find_spec(cli.MODULES[name]), f"{name} is listed but does not exist"


def test_expected_errors_end_without_a_traceback(capsys):
    def fails(argv):
        raise MilesDisaggError("the engine is gone; restart it")

    assert cli.run_command(fails, []) == 1
    assert capsys.readouterr().err == "MilesDisaggError: the engine is gone; restart it\n"


def test_the_script_is_the_train_command():
    argv = ["--lr", "0", "--num-rollout", "1"]
    script = subprocess.run(
        [sys.executable, "train_async.py", *argv], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert script.returncode == 2
    assert "--lr is 0" in script.stderr
    assert "Traceback" not in script.stderr
