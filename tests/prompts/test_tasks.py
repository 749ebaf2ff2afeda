"""Generated tasks: answers, split, determinism."""

import pytest

from miles_disagg.domain.errors import ConfigError
from miles_disagg.prompts.dataset_files import read_rows
from miles_disagg.prompts.tasks import addition_answer, make_task, write_jsonl


def test_addition_has_the_digits_lowest_first():
    assert addition_answer(47, 85) == "231"
    for item in make_task("addition", num_train=50, num_held_out=50).train:
        a, b = item.input.rstrip("=").split("+")
        assert int(item.label[::-1]) == int(a) + int(b)


def test_all_sums_are_there_and_none_is_on_both_sides_in_either_order():
    split = make_task("addition", num_held_out=10_000)
    assert len(split.train) + len(split.held_out) == 90 * 90
    assert 0.07 < len(split.held_out) / 8100 < 0.13
    assert not {i.identity for i in split.train} & {i.identity for i in split.held_out}


def test_the_same_arguments_give_the_same_items_and_the_side_of_an_item_never_changes():
    first, again, other = (make_task("addition", seed=s, num_train=500) for s in (0, 0, 1))
    assert first == again
    assert first.train != other.train
    assert not {i.identity for i in other.train} & {i.identity for i in first.held_out}


def test_reasoning_gym_tasks_go_by_name_and_do_not_overlap():
    pytest.importorskip("reasoning_gym")
    split = make_task("basic_arithmetic", seed=3, num_train=200, num_held_out=30)
    assert (len(split.train), len(split.held_out)) == (200, 30)
    questions = [i.input for i in (*split.train, *split.held_out)]
    assert len(set(questions)) == 230
    assert split == make_task("basic_arithmetic", seed=3, num_train=200, num_held_out=30)


def test_an_unknown_task_is_refused_by_name():
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigError, match="--task no_such_task"):
        make_task("no_such_task", num_train=10)


def test_items_are_written_as_prompt_data(tmp_path):
    items = make_task("addition", num_train=5, num_held_out=5).train
    write_jsonl(tmp_path / "train.jsonl", items)
    rows = list(read_rows(str(tmp_path / "train.jsonl")))
    assert [(n, r["input"], r["label"]) for n, r in rows] == [(n + 1, i.input, i.label) for n, i in enumerate(items)]
