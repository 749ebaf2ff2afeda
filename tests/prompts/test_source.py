"""Prompt data: parsing, checks, order, cursor."""

import json
from collections import Counter

import pyarrow
import pyarrow.ipc
import pyarrow.parquet as parquet
import pytest

from miles_disagg.domain.errors import ConfigError, PromptDataError
from miles_disagg.prompts.quickstart import VOCABULARY, make_tokenizer
from miles_disagg.prompts.source import DataOptions, DatasetSource, check_tokenizer
from miles_disagg.prompts.tasks import make_task


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def write(tmp_path, *lines: object, name: str = "data.jsonl") -> str:
    path = tmp_path / name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return str(path)


def source(path: str, tokenizer, **options) -> DatasetSource:
    return DatasetSource.from_files([path], tokenizer, DataOptions(**options))


def sums(n: int) -> list[dict]:
    return [{"input": f"{i}+{i}=", "label": str(2 * i)} for i in range(n)]


def take(source: DatasetSource, n: int) -> list[str]:
    return [p.key for p in (source.next_prompt() for _ in range(n)) if p is not None]


def test_a_row_becomes_a_tokenized_prompt(tmp_path, tokenizer):
    path = write(tmp_path, {"q": "12+3=", "a": 15, "more": {"level": 2}})
    prompt = source(path, tokenizer, input_key="q", label_key="a", metadata_key="more").next_prompt()
    assert prompt is not None
    assert prompt.tokens == tuple(VOCABULARY[c] for c in "12+3=")
    assert (prompt.text, prompt.label, prompt.metadata, prompt.key) == ("12+3=", "15", {"level": 2}, "0:0")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"input": "1+1="', "line 2: not valid JSON"),
        ("[1]", "line 2: not a JSON object"),
        ({"question": "1+1="}, r"line 2: no field 'input' \(there are \['question'\]\); set --input-key"),
        ({"input": "1+1="}, "line 2: no field 'label'.*--label-key"),
        ({"input": 7, "label": "7"}, "line 2: 'input' is neither text nor a list of messages"),
        ({"input": "", "label": "7"}, "line 2: field 'input' is empty"),
        ({"input": "1+1=", "label": "2", "metadata": 3}, "line 2: field 'metadata' is not an object"),
        ({"input": "x", "label": "2"}, "line 2: it has characters that the tokenizer does not know"),
        ({"input": [{"role": "user", "content": "1"}], "label": "2"}, "line 2: the chat template refused it"),
        ({"input": "1" * 40, "label": "2"}, "line 2: prompt has 40 tokens, the context leaves room for 30.*skip"),
    ],
)
def test_a_broken_line_is_named_with_its_file(tmp_path, tokenizer, line, message):
    path = write(tmp_path, {"input": "1+1=", "label": "2"}, line)
    with pytest.raises(PromptDataError, match=message) as caught:
        source(path, tokenizer, max_prompt_tokens=30)
    assert (caught.value.file, caught.value.line) == (path, 2)


def test_binary_rubbish_is_a_broken_line(tmp_path, tokenizer):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"input": "1+1=", "label": "2"}\n\xff\xfe\n')
    with pytest.raises(PromptDataError, match="line 2: not valid JSON"):
        source(str(path), tokenizer)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("missing.jsonl", None, "no such file; check --prompt-data"),
        ("data.csv", "a,b", "only .jsonl and .parquet"),
        ("empty.jsonl", "\n\n", "no usable prompt"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, tokenizer, name, text, message):
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(PromptDataError, match=message) as caught:
        source(str(path), tokenizer)
    assert name in str(caught.value) or text == "\n\n"


def test_prompts_that_are_too_long_can_be_skipped_and_are_listed(tmp_path, tokenizer):
    path = write(tmp_path, *sums(2), {"input": "1" * 40, "label": "2"})
    data = source(path, tokenizer, max_prompt_tokens=30, long_prompts="skip")
    assert (len(data), data.num_skipped) == (2, 1)
    assert data.skipped == [f"{path}, line 3: 40 tokens"]


def test_every_epoch_is_a_different_permutation_fixed_by_the_seed(tmp_path, tokenizer):
    path = write(tmp_path, *sums(20))
    first, again, other = (source(path, tokenizer, seed=s) for s in (1, 1, 2))
    keys = take(first, 40)
    assert keys == take(again, 40)
    assert keys != take(other, 40)
    orders = [[k.split(":")[1] for k in keys if k.startswith(f"{epoch}:")] for epoch in (0, 1)]
    assert Counter(orders[0]) == Counter(orders[1]) == Counter(map(str, range(20)))
    assert orders[0] != orders[1]


def test_without_shuffling_prompts_come_in_file_order_and_end_after_the_last_epoch(tmp_path, tokenizer):
    data = source(write(tmp_path, *sums(3)), tokenizer, shuffle=False, epochs=2)
    assert take(data, 9) == ["0:0", "0:1", "0:2", "1:0", "1:1", "1:2"]
    assert data.next_prompt() is None


def test_a_cursor_continues_in_the_middle_of_an_epoch(tmp_path, tokenizer):
    path = write(tmp_path, *sums(7))
    data, resumed = source(path, tokenizer), source(path, tokenizer)
    take(data, 10)
    resumed.load_state(json.loads(json.dumps(data.state())))
    assert take(resumed, 10) == take(data, 10)
    assert resumed.prompt("1:3").text == "3+3="


def test_a_cursor_of_other_data_or_another_order_is_refused(tmp_path, tokenizer):
    data = source(write(tmp_path, *sums(7)), tokenizer)
    with pytest.raises(PromptDataError, match="not the prompts of the run being resumed"):
        source(write(tmp_path, *sums(8), name="other.jsonl"), tokenizer).load_state(data.state())
    with pytest.raises(PromptDataError, match="shuffled with seed 0, not 5"):
        source(write(tmp_path, *sums(7)), tokenizer, seed=5).load_state(data.state())


def test_a_generated_task_is_a_source(tokenizer):
    items = make_task("addition", num_train=10, num_held_out=5).train
    data = DatasetSource.from_items("addition", items, tokenizer, DataOptions(input_key="x", label_key=None))
    assert [p.label for p in data.all()] == [i.label for i in items]


class ChatTokenizer:
    """Ids are code points; the template writes roles in angle brackets."""

    def encode(self, text, *, add_special_tokens=True):
        return ([0] if add_special_tokens else []) + [ord(c) for c in text]

    def apply_chat_template(self, conversation, *, tokenize, add_generation_prompt, **kwargs):
        assert not tokenize
        assert add_generation_prompt
        return "".join(f"<{m['role']}>{m['content']}" for m in conversation) + "<assistant>" + kwargs.get("tail", "")


def test_chat_templates_are_applied_to_text_and_to_messages_without_doubling_special_tokens(tmp_path):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = write(tmp_path, {"input": "hi", "label": None}, {"input": messages, "label": None})
    options = {"apply_chat_template": True, "chat_template_kwargs": {"tail": "!"}, "shuffle": False}
    first, second = source(path, ChatTokenizer(), **options).all()
    assert (first.text, second.text) == ("<user>hi<assistant>!", "<system>s<user>u<assistant>!")
    assert first.tokens == tuple(map(ord, first.text))
    plain = source(write(tmp_path, {"input": "hi", "label": None}), ChatTokenizer()).all()[0]
    assert plain.tokens == (0, *map(ord, "hi"))


def test_parquet_rows_are_read_like_lines(tmp_path, tokenizer):
    path = str(tmp_path / "data.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(sums(3)), path)
    assert [p.label for p in source(path, tokenizer, metadata_key=None).all()] == ["0", "2", "4"]
    (tmp_path / "bad.parquet").write_bytes(b"not parquet")
    with pytest.raises(PromptDataError, match="not a readable Parquet file"):
        source(str(tmp_path / "bad.parquet"), tokenizer)


def save_to_disk(directory, rows, shards: int = 2) -> str:
    """What `datasets.Dataset.save_to_disk` leaves (5.2.0): Arrow streams and a `state.json` that lists them."""
    directory.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{shards:05d}.arrow" for i in range(shards)]
    for i, name in enumerate(names):
        table = pyarrow.Table.from_pylist(rows[i * len(rows) // shards : (i + 1) * len(rows) // shards])
        with pyarrow.ipc.new_stream(str(directory / name), table.schema) as stream:
            stream.write_table(table)
    (directory / "state.json").write_text(json.dumps({"_data_files": [{"filename": n} for n in names], "_split": None}))
    (directory / "dataset_info.json").write_text("{}")
    return str(directory)


def test_a_saved_hugging_face_data_set_is_read_in_order(tmp_path, tokenizer):
    path = save_to_disk(tmp_path / "saved", sums(5))
    assert [p.label for p in source(path, tokenizer, metadata_key=None).all()] == ["0", "2", "4", "6", "8"]
    (tmp_path / "saved" / "data-00001-of-00002.arrow").write_bytes(b"rubbish")
    with pytest.raises(PromptDataError, match="data-00001-of-00002.arrow.*not a readable Arrow file"):
        source(path, tokenizer)
    (tmp_path / "saved" / "state.json").write_text('{"_data_files": [{"filename": "../other.arrow"}]}')
    with pytest.raises(PromptDataError, match="no name of a file in it"):
        source(path, tokenizer)


def test_a_directory_of_parquet_files_is_one_split(tmp_path, tokenizer):
    data = tmp_path / "set" / "data"
    data.mkdir(parents=True)
    for i, rows in enumerate((sums(2), sums(3))):
        parquet.write_table(pyarrow.Table.from_pylist(rows), data / f"train-{i:05d}-of-00002.parquet")
    labels = [p.label for p in source(str(tmp_path / "set"), tokenizer, metadata_key=None).all()]
    assert labels == ["0", "2", "0", "2", "4"]
    parquet.write_table(pyarrow.Table.from_pylist(sums(1)), data / "test-00000-of-00001.parquet")
    with pytest.raises(PromptDataError, match="files of test, train: give the file of one"):
        source(str(tmp_path / "set"), tokenizer)


def test_a_directory_of_splits_lists_them_and_an_empty_one_is_nothing(tmp_path, tokenizer):
    for split in ("train", "test"):
        save_to_disk(tmp_path / "both" / split, sums(2))
    (tmp_path / "both" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(PromptDataError, match="has the splits test, train: give one"):
        source(str(tmp_path / "both"), tokenizer)
    (tmp_path / "none").mkdir()
    with pytest.raises(PromptDataError, match="neither a saved data set nor Parquet files"):
        source(str(tmp_path / "none"), tokenizer)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    (tmp_path / "data.parquet").write_bytes(b"")
    with pytest.raises(PromptDataError, match="miles-disagg\\[data\\]"):
        source(str(tmp_path / "data.parquet"), tokenizer)


def test_a_tokenizer_with_more_ids_than_the_model_has_rows_is_refused(tokenizer):
    with pytest.raises(ConfigError, match=r"--hf-checkpoint: the tokenizer produces ids up to 13.*vocabulary has 12"):
        check_tokenizer(tokenizer, {"vocab_size": 12, "eos_token_id": 13})
    check_tokenizer(tokenizer, {"vocab_size": 14, "eos_token_id": 13})
    check_tokenizer(tokenizer, {"vocab_size": 128, "eos_token_id": [13, 5]})


def test_a_tokenizer_that_ends_sequences_otherwise_is_refused(tokenizer):
    with pytest.raises(ConfigError, match=r"ends a sequence with id 13, config.json with \[2\]"):
        check_tokenizer(tokenizer, {"vocab_size": 14, "eos_token_id": 2})
