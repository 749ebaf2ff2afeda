"""What is refused before a run starts: every problem at once, naming flags and a remedy."""

import socket
from pathlib import Path
from typing import Any

import pytest

from miles_disagg.config.checks import check
from miles_disagg.config.flags import flag_names, parse_run, section_of
from miles_disagg.config.machine import Machine
from miles_disagg.config.resolve import resolve
from miles_disagg.config.run import RunConfig

LAPTOP = Machine(cpus=2, gpus=0)
SOUND = ["--hf-checkpoint", "model", "--num-rollout", "4", "--task", "addition"]


def config_of(words: list[str]) -> RunConfig:
    """The configuration of simple flags, without the cost of building a command-line parser every time."""
    values: dict[str, Any] = {}
    passed: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            field = word.removeprefix("--").replace("-", "_")
            ours = field in section_of()
            words_of = values.setdefault(field, []) if ours else passed.setdefault(word.removeprefix("--sglang-"), [])
        else:
            words_of.append(word)
    many = ("rollout_external_engine_addrs", "eval_prompt_data", "opd_teacher_urls")
    flags = {f: v if f in many else v[-1] if v else True for f, v in values.items()}
    return RunConfig().replace(**flags, sglang_args=passed)


def problems(*flags: str, machine: Machine | None = LAPTOP, environ: dict[str, str] | None = None) -> list[str]:
    return check(config_of([*SOUND, *flags]), machine, environ or {})


def test_a_sound_configuration_has_no_problems_resolved_or_not():
    config = config_of(SOUND)
    assert check(config, LAPTOP, {}) == []
    assert check(resolve(config, 0), LAPTOP, {}) == []


# fmt: off
REFUSED = [
    # numbers
    ("--rollout-batch-size 0", "--rollout-batch-size is 0: it must be at least 1"),
    ("--lr 0", "--lr is 0: it must be above 0"),
    ("--lr nan", "--lr is nan"),
    ("--rollout-top-p 1.5", "--rollout-top-p is 1.5: it must be above 0 and at most 1"),
    ("--async-data-buffer-capacity-factor 0.5", "it must be at least 1"),
    ("--gateway-port 70000", "--gateway-port is 70000"),
    ("--rollout-temperature 0", "--rollout-temperature is 0"),
    # prompts and rewards
    ("--prompt-data p.jsonl", "--prompt-data and --task"),
    ("--task leg_counting", "--task-size is missing"),
    ("--rm-type exact", "--task addition scores its own answers"),
    ("--rm-type exakt", "perhaps you meant exact"),
    ("--rm-type exact --custom-rm-path a.b", "--rm-type and --custom-rm-path"),
    ("--rm-type remote_rm", "--rm-url"),
    ("--rm-url http://x", "--rm-type remote_rm and --rm-url"),
    ("--eval-prompt-data a", "pairs of a name and a file"),
    ("--eval-prompt-data a b.jsonl", "--eval-interval: give both"),
    ("--n-samples-per-prompt 1", "a group of one has no advantage"),
    # topologies
    ("--rollout-external", "needs --rollout-external-engine-addrs"),
    ("--rollout-external-engine-addrs h:1", "without --rollout-external"),
    ("--rollout-external --rollout-external-engine-addrs h", "'h' is not HOST:PORT"),
    ("--rollout-external --rollout-external-engine-addrs h:1 h:1", "h:1 is given twice"),
    ("--rollout-external --rollout-external-engine-addrs h:1 --rollout-num-gpus 2", "--rollout-num-gpus starts"),
    ("--rollout-external --rollout-external-engine-addrs h:1 --sglang-x 1", "--sglang-* starts engines"),
    ("--rollout-endpoint http://x", "--version-store go together"),
    ("--version-store /v", "--rollout-endpoint and --version-store"),
    ("--rollout-endpoint x:1 --version-store /v --update-weight-transport disk", "is not an http:// or https:// URL"),
    ("--rollout-endpoint http://x --version-store /v --update-weight-transport broadcast",
     "needs weights through the store"),
    ("--sglang-config /none.yaml", "/none.yaml: No such file"),
    ("--rollout-engine sglang --sglang-nnodes 2", "--sglang-nnodes is set by this program"),
    ("--rollout-engine sglang --rollout-num-gpus 16 --rollout-num-gpus-per-engine 16 "
     "--update-weight-transfer-mode p2p", "p2p reaches engines on one node"),
    ("--kl-reference http://r:1", "--kl-reference has no effect without --use-kl-loss and --kl-loss-coef"),
    ("--kl-reference-timeout 5", "--kl-reference-timeout has no effect without --kl-reference"),
    ("--kl-reference ref --use-kl-loss --kl-loss-coef 0.1", "no --sglang-config names frozen models"),
    ("--kl-reference http://r:1 --use-kl-loss --kl-loss-coef 0.1 --rollout-temperature 0.8", "those of temperature 1"),
    ("--sglang-router-ip r", "--sglang-router-ip and --sglang-router-port go together"),
    ("--sglang-router-port 0 --sglang-router-ip r", "--sglang-router-port is 0"),
    ("--sglang-router-ip r --sglang-router-port 30000", "is a router in front of attached engines"),
    ("--rollout-external --rollout-external-engine-addrs r:1 --sglang-router-ip r --sglang-router-port 1",
     "http://r:1 is also in --rollout-external-engine-addrs"),
    ("--rollout-external --rollout-external-engine-addrs h:1 --sglang-router-ip r --sglang-router-port 1 "
     "--update-weight-transfer-mode p2p", "p2p writes into one engine at a time"),
    ("--rollout-external --rollout-external-engine-addrs h:1 --sglang-router-ip r --sglang-router-port 1 "
     "--update-weight-transfer-mode disk-delta --activation in-place", "--activation in-place is for single engines"),
    ("--sglang-config /none.yaml --rollout-external --rollout-external-engine-addrs h:1",
     "this run starts none (--rollout-external): drop one of them"),
    ("--sglang-config /none.yaml --rollout-num-gpus 2", "both say which engines there are"),
    ("--rollout-auth-token-file /none/token", "has no effect without --rollout-endpoint or --rollout-external"),
    ("--rollout-external --rollout-external-engine-addrs h:1 --rollout-auth-token-file /none/token",
     "/none/token: No such file"),
    ("--rollout-endpoint http://x --version-store /v --rollout-auth-token-file /none/token",
     "/none/token: No such file"),
    ("--rollout-endpoint http://x --version-store /v --rollout-external --rollout-external-engine-addrs h:1",
     "different topologies"),
    ("--rollout-endpoint http://x --version-store /v --update-weight-disk-dir /w --update-weight-transport disk",
     "different stores"),
    # engines
    ("--rollout-num-gpus 3 --rollout-num-gpus-per-engine 2 --rollout-engine sglang", "gpus 3 is not divisible"),
    (
        "--trainer-device cuda --rollout-num-gpus-per-engine 2 --rollout-engine sglang",
        "without --rollout-num-gpus runs the engines' ranks on the CPU",
    ),
    ("--rollout-num-gpus 4 --num-rollout-engines 3", "contradicts --rollout-num-gpus"),
    ("--rollout-num-gpus 12 --rollout-num-gpus-per-engine 12", "multiple of --num-gpus-per-node 8"),
    ("--rollout-num-gpus 2 --rollout-num-gpus-per-engine 2", "--rollout-engine embedded runs on one device"),
    ("--sglang-mem-fraction-static 0.8", "--sglang-mem-fraction-static has no effect with --rollout-engine embedded"),
    ("--sglang-python /usr/bin/python3", "--sglang-python has no effect"),
    ("--rollout-engine sglang --sglang-pythn x", "perhaps you meant --sglang-python"),
    ("--rollout-engine sglang --sglang-port 1", "--sglang-port is set by this program: use --gateway-port"),
    ("--rollout-engine sglang --sglang-python /nowhere/python", "/nowhere/python is not an executable file"),
    # weights
    ("--update-weight-transfer-mode p2p --update-weight-mode delta --update-weight-p2p-staging never",
     "patches staging areas by one-sided writes"),
    ("--update-weight-transport p2p --update-weight-mode delta --update-weight-p2p-transport torch",
     "patches staging areas by one-sided writes"),
    ("--update-weight-transfer-mode p2p --rollout-endpoint http://x --version-store s3://b/w", "hides them"),
    ("--update-weight-p2p-transport torch", "--update-weight-p2p-transport is for peer-to-peer updates"),
    ("--update-weight-p2p-staging never", "--update-weight-p2p-staging is for peer-to-peer updates"),
    ("--update-weight-transfer-mode disk-delta --update-weight-mode full", "means --update-weight-mode delta, not"),
    ("--update-weight-transfer-mode broadcast --update-weight-transport disk", "means --update-weight-transport"),
    ("--colocate", "--colocate: trainer and engines are separate systems"),
    ("--colocate --update-weight-mode delta", "--colocate cannot be combined with --update-weight-mode delta"),
    ("--update-weight-encoding xor", "--update-weight-encoding is for deltas on disk"),
    ("--update-weight-anchor-interval 3", "--update-weight-anchor-interval is for deltas on disk"),
    ("--update-weight-anchor-interval 0 --update-weight-transfer-mode disk-delta", "it must be at least 1"),
    ("--update-weight-anchor-interval auto", "--update-weight-anchor-interval is for deltas on disk"),
    ("--update-weight-keep-versions 3", "--update-weight-keep-versions is for deltas on disk"),
    ("--update-weight-delta-level max", "--update-weight-delta-level is for deltas on disk"),
    ("--update-weight-transfer-mode disk-delta --update-weight-delta-level max --update-weight-encoding xor",
     "--update-weight-delta-level max is a level of sparse"),
    ("--update-weight-transfer-mode disk-delta --update-weight-encoding indices", "cannot go over"),
    ("--update-weight-mode delta --update-weight-encoding sparse", "cannot go over"),
    ("--update-weight-mode delta --rollout-engine sglang --sglang-python /bin/true", "needs --rollout-engine embedded"),
    ("--update-weight-transfer-mode disk-delta --update-weight-snapshot-device cuda --trainer-device cpu",
     "--update-weight-snapshot-device cuda needs --trainer-device cuda"),
    ("--update-weight-snapshot-device cuda --trainer-device cuda", "--update-weight-snapshot-device is for deltas"),
    ("--update-weight-transfer-mode disk-delta --update-weight-encoding xor --update-weight-snapshot-device cuda "
     "--trainer-device cuda", "xor is encoded on the CPU"),
    ("--update-weight-transfer-mode disk-delta --update-weight-keep-versions 3", "has no effect without"),
    ("--custom-update-weight-post-write-path a.b", "--custom-update-weight-post-write-path is for versions on disk"),
    ("--custom-update-weight-pre-read-path a.b", "--custom-update-weight-pre-read-path is for versions on disk"),
    ("--update-weight-disk-keep-files", "--update-weight-disk-keep-files is for"),
    (
        "--update-weight-transfer-mode disk-delta --update-weight-anchor-interval 4 --update-weight-keep-versions 3 "
        "--update-weight-disk-keep-files",
        "drop one",
    ),
    ("--activation in-place", "--activation in-place scatters deltas"),
    ("--actor-gpu-fraction 0.5 --actor-num-gpus-per-node 2", "--actor-num-gpus-per-node is 2: make it 1"),
    ("--rollout-engine sglang --rollout-gpu-fraction 0.5", "no engine on one: add --rollout-num-gpus 1"),
    ("--trainer-device cpu --actor-gpu-fraction 0.5", "0.5 is a share of a GPU, but --trainer-device"),
    (
        "--rollout-engine sglang --rollout-num-gpus 1 --actor-gpu-fraction 0.5 --rollout-gpu-fraction 0.5",
        "NCCL refuses two processes on one GPU",
    ),
    ("--update-weight-disk-dir gs://b/p", "only a directory, file:// and s3://"),
    ("--update-weight-local-checkpoint-dir s3://b", "must be a local directory"),
    # pacing
    ("--pause-generation-mode abort", "--pause-generation-mode abort cannot be used with --schedule async"),
    ("--schedule sync --over-sampling-batch-size 8", "8 is below --rollout-batch-size 32"),
    ("--over-sampling-batch-size 64", "--over-sampling-batch-size needs --schedule sync"),
    ("--partial-rollout --max-weight-staleness 0", "--partial-rollout with --max-weight-staleness 0"),
    ("--partial-rollout --schedule sync", "continues what --over-sampling-batch-size left over"),
    ("--eval-function-path a.b", "--eval-function-path has no effect without --eval-interval"),
    (
        "--eval-function-path a.b --eval-interval 5 --update-weight-transfer-mode broadcast",
        "--eval-function-path reads versions from the store",
    ),
    ("--eval-num-replicas 1", "--eval-num-replicas 1 has no effect without --eval-interval"),
    ("--eval-num-replicas 1 --eval-interval 5", "use --update-weight-transfer-mode disk-delta (or disk-full)"),
    (
        "--eval-num-replicas 1 --eval-interval 5 --update-weight-transfer-mode disk-delta --eval-function-path a.b",
        "--eval-num-replicas 1 and --eval-function-path both say what evaluates",
    ),
    (
        "--eval-num-replicas 1 --eval-interval 5 --rollout-endpoint http://x --version-store /v",
        "this run starts none (--rollout-endpoint)",
    ),
    (
        "--eval-num-gpus 2 --eval-interval 5 --rollout-external --rollout-external-engine-addrs h:1 "
        "--update-weight-transfer-mode disk-full",
        "--eval-num-gpus 2 starts engines, but this run starts none (--rollout-external)",
    ),
    (
        "--eval-num-gpus 3 --eval-interval 5 --rollout-num-gpus 2 --rollout-num-gpus-per-engine 2",
        "--eval-num-gpus 3 is not divisible by --rollout-num-gpus-per-engine 2",
    ),
    ("--eval-num-gpus 2 --eval-num-replicas 1 --eval-interval 5", "contradicts --eval-num-gpus 2 / "),
    ("--eval-num-replicas 1 --rollout-num-gpus 1 --eval-interval 5", "say on how many GPUs with --eval-num-gpus"),
    (
        "--eval-num-gpus 1 --eval-interval 5 --update-weight-transfer-mode disk-delta",
        "--eval-num-gpus 1 want 1 GPU(s), this machine has 0",
    ),
    ("--mask-offpolicy-in-partial-rollout", "has no effect without --partial-rollout"),
    ("--async-max-concurrent-samples 3", "--async-max-concurrent-samples 3 is below --n-samples-per-prompt 8"),
    ("--max-weight-staleness 0 --update-weights-interval 2", "set the interval to 1"),
    # trainer
    ("--tensor-model-parallel-size 2", "not divisible by --tensor-model-parallel-size 2"),
    ("--global-batch-size 100", "--global-batch-size 100 does not divide the 256 samples"),
    ("--actor-num-gpus-per-node 3", "--global-batch-size 256 is not divisible by the data parallel size 3"),
    ("--expert-model-parallel-size 2", "--expert-model-parallel-size 2 does not divide the data parallel size 1"),
    ("--max-tokens-per-gpu 512", "--max-tokens-per-gpu 512 cannot hold one sample"),
    ("--kl-loss-coef 0.1", "without --use-kl-loss"),
    ("--min-lr 1", "--min-lr 1 is above --lr"),
    ("--lr-decay-style cosine --lr-warmup-iters 4", "leaves nothing of the 4 steps"),
    # the machine
    ("--trainer-device cuda", "--actor-num-gpus-per-node 1 want 1 GPU(s), this machine has 0"),
    ("--rollout-num-gpus 2", "--rollout-num-gpus 2 want 2 GPU(s)"),
    ("--actor-num-nodes 2", "join a cluster with --ray-address"),
    ("--actor-node-resource trainer_node", "--actor-node-resource names nodes of a Ray cluster"),
    # loss
    ("--custom-advantage-function-path a.b --advantage-estimator rloo", "both say what an advantage is"),
    ("--custom-advantage-function-path a.b --disable-grpo-std-normalization", "has no effect with --custom-adv"),
    ("--custom-loss-function-path a.b --policy-loss cispo", "both say what the loss is"),
    ("--custom-loss-function-path a.b --eps-clip-c 3", "--eps-clip-c has no effect with --custom-loss"),
    ("--gamma 0.9", "--gamma has no effect without --advantage-estimator ppo"),
    ("--num-critic-only-steps 2", "--num-critic-only-steps has no effect without --advantage-estimator ppo"),
    ("--advantage-estimator ppo --num-critic-only-steps 4", "leaves nothing of the 4 steps"),
    ("--advantage-estimator ppo --lambd 1.5", "--lambd is 1.5: it must be at least 0 and at most 1"),
    ("--opd-kl-coef 0.5", "--opd-kl-coef has no effect without --use-opd"),
    ("--use-opd", "--use-opd needs --opd-teacher-urls"),
    ("--use-opd --opd-teacher-urls host:1", "'host:1' is not an http:// or https:// URL"),
    ("--use-opd --opd-teacher-urls a=http://x a=http://y", "teacher 'a' is given twice"),
    ("--use-opd --opd-teacher-urls http://x --rollout-temperature 0.7", "set --rollout-temperature 1"),
    ("--tis-level sequence", "--tis-level has no effect without --use-tis"),
    ("--rs-lower-bound 0.9", "--rs-lower-bound has no effect without --use-rs"),
    ("--use-tis --tis-clip-low 0.5", "--tis-clip-low has no effect with --tis-mode truncate"),
    ("--use-tis --tis-mode mask --tis-clip-low 3", "--tis-clip-low 3 is above --tis-clip 2"),
    ("--use-rs --rs-lower-bound 3", "--rs-lower-bound 3 is above --rs-upper-bound 2"),
    ("--use-rollout-logprobs --use-tis", "--use-rollout-logprobs makes every importance ratio 1"),
    ("--eps-clip-c 1", "--eps-clip-c is 1: it must be above 1"),
    ("--policy-loss cispo --eps-clip-c 3", "--eps-clip-c has no effect with --policy-loss cispo"),
    ("--advantage-estimator gspo --policy-loss cispo", "--advantage-estimator gspo means --policy-loss gspo"),
    ("--advantage-estimator rloo --disable-grpo-std-normalization", "has no effect with --advantage-estimator rloo"),
    ("--calculate-per-token-loss --loss-aggregation constant", "contradicts --loss-aggregation constant"),
    ("--run-id ../x", "--run-id: run id '../x' is not legal"),
    ("--run-dir s3://b/x", "must be a local directory"),
]
# fmt: on


@pytest.mark.parametrize(("flags", "says"), REFUSED, ids=[flags for flags, _ in REFUSED])
def test_what_cannot_work_is_refused_by_flags_that_exist(flags: str, says: str):
    found = problems(*flags.split())
    assert any(says in problem for problem in found), found
    known = {*flag_names(), *(word for word in flags.split() if word.startswith("--sglang-")), "--sglang-*"}
    for problem in found:
        named = {word.strip(",:;()'") for word in problem.split() if word.startswith("--")}
        assert named, f"names no flag: {problem}"
        assert named <= known, f"names a flag that does not exist: {problem}"


def test_nixl_that_is_not_installed_is_named_with_both_ways_out(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (found,) = problems("--update-weight-transfer-mode", "p2p")
    assert "pip install 'miles-disagg[p2p]'" in found
    assert "--update-weight-p2p-transport torch" in found
    assert problems("--update-weight-transfer-mode", "p2p", "--update-weight-p2p-transport", "torch") == []


def test_all_problems_are_reported_together():
    p2p = ("--update-weight-transport", "p2p", "--update-weight-mode", "delta", "--update-weight-p2p-staging", "never")
    found = problems("--lr", "0", "--colocate", *p2p, "--rollout-external")
    assert len(found) >= 3
    assert any("--lr" in p for p in found)
    assert any("p2p" in p for p in found)
    assert any("--rollout-external " in p for p in found)


def test_what_is_missing_is_named():
    found = " ".join(check(RunConfig(), LAPTOP, {}))
    for name in ("--hf-checkpoint is missing", "--num-rollout is missing", "--prompt-data is missing", "--rm-type"):
        assert name in found


def test_prompt_data_with_an_exact_reward_needs_a_label_key():
    argv = [*SOUND[:4], "--prompt-data", "p.jsonl", "--rm-type", "exact"]
    assert "--label-key" in " ".join(check(config_of(argv), LAPTOP, {}))
    assert check(config_of([*argv, "--label-key", "answer"]), LAPTOP, {}) == []


@pytest.mark.parametrize(
    "flags",
    [
        "--pause-generation-mode abort --schedule sync",
        "--pause-generation-mode abort --partial-rollout --mask-offpolicy-in-partial-rollout",
        "--schedule sync --over-sampling-batch-size 64 --partial-rollout",
        "--eval-num-replicas 2 --eval-interval 5 --update-weight-transfer-mode disk-full",
        "--update-weight-transfer-mode disk-delta --update-weight-encoding sparse --update-weight-anchor-interval 10",
        "--update-weight-mode delta --update-weight-transport disk --update-weight-transfer-mode disk-delta",
        "--update-weight-mode delta --update-weight-transport broadcast",
        "--update-weight-mode delta --update-weight-encoding indices",
        "--update-weight-transfer-mode disk-delta --update-weight-delta-level max --update-weight-keep-versions 4 "
        "--update-weight-anchor-interval 2",
        "--update-weight-transfer-mode disk-delta --update-weight-anchor-interval auto",
        "--update-weight-transfer-mode disk-full --custom-update-weight-post-write-path a.b",
        "--update-weight-transfer-mode disk-full --update-weight-disk-keep-files",
        "--rollout-external --rollout-external-engine-addrs h:1 i:1 --update-weight-transfer-mode disk-full",
        "--rollout-external --rollout-external-engine-addrs h:1 i:1 --sglang-router-ip r --sglang-router-port 1",
        "--rollout-endpoint http://h:1 --version-store s3://b/p --update-weight-transfer-mode disk-delta",
        "--actor-num-gpus-per-node 8 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
    ],
)
def test_what_can_work_is_accepted_resolved_or_not(flags: str):
    config = config_of([*SOUND, *flags.split()])
    assert check(config, LAPTOP, {}) == []
    assert check(resolve(config, 0), LAPTOP, {}) == []


def test_resources_of_a_cluster_that_is_joined_are_left_to_ray():
    flags = ("--rollout-num-gpus", "16", "--actor-num-nodes", "2", "--rollout-node-resource", "rollout_node")
    assert problems(*flags, "--ray-address", "auto") == []
    assert problems(*flags, environ={"RAY_ADDRESS": "10.0.0.1:6379"}) == []
    assert problems(*flags) != []


def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"--gateway-port {port} on 127.0.0.1: Address already in use" in " ".join(
            problems("--gateway-port", str(port))
        )


def test_a_run_directory_that_holds_a_run_is_refused(tmp_path: Path):
    assert problems("--run-dir", str(tmp_path / "new")) == []
    (tmp_path / "config.yaml").write_text("{}")
    assert "already holds a run" in " ".join(problems("--run-dir", str(tmp_path)))
    (tmp_path / "file").write_text("")
    assert "is not a directory" in " ".join(problems("--run-dir", str(tmp_path / "file")))


def test_a_publication_directory_that_holds_this_runs_versions_is_refused(tmp_path: Path):
    flags = ("--update-weight-disk-dir", str(tmp_path), "--update-weight-transfer-mode", "disk-full", "--run-id", "r1")
    assert problems(*flags) == []
    (tmp_path / "r1").mkdir()
    (tmp_path / "r1" / "run.json").write_text("{}")
    assert "already holds versions of run r1" in " ".join(problems(*flags))


def test_flags_of_continuing_a_run_that_cannot_work_are_refused(tmp_path: Path):
    assert "--load" in " ".join(problems("--load", str(tmp_path / "nothing")))
    assert "not the directory of a run" in " ".join(problems("--load", str(tmp_path)))
    assert "--resume auto needs --run-dir" in " ".join(problems("--resume", "auto"))
    assert "--save-total-limit has no effect" in " ".join(problems("--save-total-limit", "3"))
    waiting = parse_run([*SOUND, "--no-async-save"])
    assert "--no-async-save has no effect" in " ".join(check(waiting, LAPTOP, {}))
    assert check(waiting.replace(save_interval=3), LAPTOP, {}) == []
    (tmp_path / "config.yaml").write_text("output: {run-id: mine}")
    assert problems("--load", str(tmp_path), "--run-id", "mine") == []
    assert "--run-id other: the run in --load" in " ".join(problems("--load", str(tmp_path), "--run-id", "other"))


def test_one_sample_a_prompt_is_enough_where_samples_are_not_compared():
    assert problems("--n-samples-per-prompt", "1", "--advantage-estimator", "ppo") == []
    assert problems("--n-samples-per-prompt", "1", "--custom-advantage-function-path", "a.b") == []


def test_teachers_have_names_and_urls():
    section = config_of([
        *SOUND, "--use-opd", "--opd-teacher-urls", "http://a:1/generate", "sums=https://b/?x=y", "http://c/?q=1",
    ]).distillation  # fmt: skip
    assert section.teachers == [
        ("default", "http://a:1"), ("sums", "https://b/?x=y"), ("default", "http://c/?q=1"),
    ]  # fmt: skip
