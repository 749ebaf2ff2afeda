"""`miles-disagg plan`: what it prints, for a run and for a trillion parameters."""

import json
import re

import pytest

from miles_disagg.cluster.plan_command import main
from miles_disagg.domain.errors import ConfigError
from miles_disagg.weights.transfer.layouts import ModelSizes, TrainerParallel
from miles_disagg.weights.transfer.report import Rates
from miles_disagg.weights.transfer.simulate import simulate


def flags(checkpoint, *more: str) -> list[str]:
    return ["--hf-checkpoint", str(checkpoint), "--num-rollout", "1", "--task", "addition", *more]


def test_the_plan_of_a_configuration_is_balanced_over_ranks(tiny_checkpoint, capsys):
    ranks = ("--actor-num-gpus-per-node", "4", "--tensor-model-parallel-size", "2", "--num-rollout-engines", "2")
    assert main([*flags(tiny_checkpoint, *ranks), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert len(said["sent_bytes"]) == 4
    assert sum(said["sent_bytes"].values()) == sum(said["received_bytes"].values())
    assert max(said["sent_bytes"].values()) < 1.3 * min(said["sent_bytes"].values())
    assert len(set(said["received_bytes"].values())) == 1


def test_a_plan_is_made_from_a_file_and_flags_that_follow_it(tiny_checkpoint, tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model:\n  hf-checkpoint: {tiny_checkpoint}\ndata:\n  task: addition\nrollout:\n  num-rollout: 1\n"
        "engines:\n  num-rollout-engines: 2\n"
    )
    slow = ("--send-gb-per-s", "0.001", "--json")  # so that the bytes count, not the writes
    assert main(["--config", str(file), *slow]) == 0
    one = json.loads(capsys.readouterr().out)
    assert main(["--config", str(file), "--actor-num-gpus-per-node", "2", *slow]) == 0
    two = json.loads(capsys.readouterr().out)
    assert [len(plan["sent_bytes"]) for plan in (one, two)] == [1, 2]
    assert one["received_bytes"] == two["received_bytes"]
    assert list(one["received_bytes"]) == ["engine-0 rank 0", "engine-1 rank 0"]
    assert two["expected_seconds"] < one["expected_seconds"]
    source, target, count = one["slowest_pair"]
    assert (source, target) == ("trainer rank 0", "engine-0 rank 0")
    assert count == one["received_bytes"][target]


def test_it_says_who_sends_how_much_and_how_long_it_takes(tiny_checkpoint, capsys):
    assert main(flags(tiny_checkpoint, "--send-gb-per-s", "2")) == 0
    said = capsys.readouterr().out
    assert "every element once" in said
    assert "slowest pair: trainer rank 0 -> engine-0 rank 0" in said
    assert "at 2 GB/s out" in said


def test_what_cannot_be_planned_is_named(tiny_checkpoint):
    with pytest.raises(ConfigError, match="--tensor-model-parallel-size 3 does not divide"):
        main(flags(tiny_checkpoint, "--tensor-model-parallel-size", "3", "--actor-num-gpus-per-node", "3"))
    with pytest.raises(ConfigError, match="--simulate takes no configuration: drop --lr 1"):
        main(["--simulate", "--lr", "1"])


def test_a_simulation_waits_for_the_ranks_that_receive_the_most():
    model = ModelSizes(1024, 256, 0, 4, 8, 8, 32, experts=16, expert_ffn=64)
    trainer = TrainerParallel(tensor=2, pipeline=2, data=4, expert=8)
    rates = Rates(send=1.0, receive=1.0, per_write=0.0)
    few, many = (simulate(n, ranks=8, rates=rates, model=model, trainer=trainer) for n in (4, 8))
    assert (few.engines, many.engines) == (2, 1)
    assert few.bottleneck.startswith("engine-")
    assert few.seconds > 1.5 * many.seconds


@pytest.mark.slow
def test_a_trillion_parameters_are_set_beside_what_was_published(capsys):
    assert main(["--simulate"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("1.09 T parameters from 256 trainer ranks (TP 4, PP 8, DP 8, EP 32)")
    assert re.search(r"8 engine\(s\) of 16 ranks, float8_e4m3fn: 1\.\d+ s", said[1])
    assert "published for 256 -> 128 GPUs, engines in 8 bits: 1.3 s" in said[-1]
