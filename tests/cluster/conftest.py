"""One Ray for all cluster tests, and a small untrained checkpoint that every layout divides."""

import os

import pytest

from miles_disagg.config.flags import parse_run
from miles_disagg.config.resolve import resolve
from miles_disagg.config.run import RunConfig


@pytest.fixture(scope="session")
def local_ray():
    """A Ray with more logical than real cores, without a dashboard; ended by `ray.shutdown`."""
    import ray

    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    ray.init(
        address="local",  # whatever else runs on this machine
        num_cpus=8,
        include_dashboard=False,
        object_store_memory=256 << 20,
        log_to_driver=False,
        runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}},
    )
    yield ray
    ray.shutdown()


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    """An untrained Qwen3 with the quickstart's tokenizer: 2 layers, 4 heads, 2 KV heads, tied embeddings."""
    from miles_disagg.prompts.quickstart import Recipe, make_model, make_tokenizer

    path = tmp_path_factory.mktemp("model") / "tiny"
    make_model(Recipe(hidden_size=64, layers=2)).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def tiny_experts(tmp_path_factory):
    """An untrained mixture of four experts, two of them active, otherwise as `tiny_checkpoint`."""
    from miles_disagg.prompts.quickstart import Recipe, make_model, make_tokenizer

    path = tmp_path_factory.mktemp("model") / "experts"
    make_model(Recipe(hidden_size=64, layers=2, experts=4)).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def run_config(tmp_path, tiny_checkpoint):
    """Builds the resolved configuration of a short run from flags."""

    def build(*flags: str) -> RunConfig:
        argv = [
            *("--hf-checkpoint", str(tiny_checkpoint), "--task", "addition", "--task-size", "64"),
            *("--num-rollout", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4"),
            *("--rollout-max-response-len", "6", "--max-weight-staleness", "2", "--use-tis"),
            *("--train-dtype", "fp32", "--trainer-device", "cpu", "--lr", "1e-3", "--eval-task-size", "16"),
            *("--actor-cpus-per-rank", "1", "--run-dir", str(tmp_path / "run")),
            *flags,
        ]
        return resolve(parse_run(argv), gpus=0)

    return build
