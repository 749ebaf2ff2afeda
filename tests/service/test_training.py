"""A training job here, a rollout service there, a store between them: replicas are killed and added meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from miles_disagg.config.model import quickstart_directory
from miles_disagg.prompts.quickstart import make_quickstart
from tests.fakes.service import ROOT, Service
from tests.fakes.tcp_proxy import tcp_proxy
from tests.service.test_limits_and_faults import cut_now_and_then
from tests.store.conftest import BUCKET, CREDENTIALS, weed_endpoint  # noqa: F401 - a fixture

STEPS = 8
FAULTS = [None, "cut", None, "truncate", None, "delay", None, "refuse"]  # of connections to the service, in turn


class Training:
    """`python train_async.py` that knows one URL and one store."""

    def __init__(self, run_dir: Path, endpoint: str, store: str, *flags: str, env: dict[str, str]):
        self.run_dir, self.log = run_dir, run_dir.with_suffix(".log")
        environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        argv = [*flags, "--run-dir", str(run_dir), "--rollout-endpoint", endpoint, "--version-store", store]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "train_async.py", *argv],
                cwd=ROOT,
                env={**environment, **env, "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def rows(self) -> list[dict[str, Any]]:
        path = self.run_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    async def steps(self, n: int, seconds: float = 180.0) -> None:
        deadline = time.monotonic() + seconds
        while len([row for row in self.rows() if "train/loss" in row]) < n:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            await asyncio.sleep(0.1)

    async def end(self, seconds: float = 180.0) -> dict[str, Any]:
        try:
            status = await asyncio.to_thread(self.process.wait, seconds)
        except subprocess.TimeoutExpired:
            self.stop()
            raise AssertionError(self.log.read_text()) from None
        assert status == 0, self.log.read_text()
        return json.loads((self.run_dir / "summary.json").read_text())

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, 9)
        self.process.wait()


def small(checkpoint: Path) -> list[str]:
    """A training that is over soon."""
    return [
        *("--hf-checkpoint", str(checkpoint), "--task", "addition", "--task-size", "64", "--eval-task-size", "16"),
        *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "6"),
        *("--train-dtype", "fp32", "--lr", "1e-4", "--max-weight-staleness", "1", "--trainer-device", "cpu"),
        *("--num-rollout", str(STEPS), "--eval-interval", str(STEPS)),
    ]


@pytest.mark.parametrize(
    "kind", [pytest.param("directory", marks=pytest.mark.slow), pytest.param("s3", marks=pytest.mark.s3)]
)
async def test_training_goes_on_while_replicas_are_killed_and_added_and_the_network_is_cut(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, checkpoint: Path
) -> None:
    store, env = str(tmp_path / "store"), {}
    if kind == "s3":
        endpoint = request.getfixturevalue("weed_endpoint")
        store, env = f"s3://{BUCKET}/{uuid.uuid4().hex}", {**CREDENTIALS, "AWS_ENDPOINT_URL": endpoint}
    token = tmp_path / "token"
    token.write_text("a-token-of-the-service\n")
    secured = ("--auth-token-file", str(token))
    async with Service(tmp_path / "service", store, checkpoint, gateway_flags=secured, env=env) as service:
        service.client.headers["Authorization"] = "Bearer a-token-of-the-service"
        await asyncio.gather(service.add("a", *secured), service.add("b", *secured))
        auth = ("--rollout-auth-token-file", str(token))
        async with tcp_proxy(service.port) as network:
            network.fault = lambda n: FAULTS[n % len(FAULTS)]
            training = Training(tmp_path / "run", network.url, store, *small(checkpoint), *auth, env=env)
            cutting = asyncio.create_task(cut_now_and_then(network.cut_all))
            try:
                await training.steps(2)
                service.kill("a")
                await service.add("c", *secured)
                summary = await training.end()
            finally:
                training.stop()
                cutting.cancel()
            assert network.connections > len(FAULTS)
        assert sorted(await service.fleet()) == ["b", "c"]
    ledger = summary["ledger"]
    assert (summary["status"], summary["steps"], summary["final_version"]) == ("completed", STEPS, STEPS)
    assert ledger["generated"] == ledger["trained"] + ledger["queued"] + sum(ledger["dropped"].values()), ledger
    assert ledger["trained"] == STEPS * 4
    rows = [row for row in training.rows() if "train/loss" in row]
    assert max(row["rollout/version_lag_max"] for row in rows) <= 1
    assert any("fleet/convergence_seconds" in row for row in training.rows())
    assert "Traceback" not in training.log.read_text()


@pytest.mark.slow
@pytest.mark.s3
@pytest.mark.timeout(1500)
async def test_training_over_s3_reaches_the_quickstarts_accuracy_while_replicas_come_and_go(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    checkpoint = Path((await asyncio.to_thread(make_quickstart, quickstart_directory())).path)
    env = {**CREDENTIALS, "AWS_ENDPOINT_URL": request.getfixturevalue("weed_endpoint")}
    store = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    async with Service(tmp_path / "service", store, checkpoint, env=env) as service:
        await asyncio.gather(service.add("a", "--relay"), service.add("b", "--relay"))
        config = ("--config", "configs/quickstart.yaml", "--num-rollout-engines", "None")
        training = Training(tmp_path / "run", service.url, store, *config, env=env)
        try:
            await training.steps(25, 400)
            service.kill("a")
            await training.steps(40, 400)
            await service.add("c", "--relay")
            await training.steps(60, 400)
            service.kill("b")
            await service.add("d", "--relay")
            summary = await training.end(600)
        finally:
            training.stop()
        assert sorted(await service.fleet()) == ["c", "d"]
    ledger = summary["ledger"]
    print(summary)
    assert summary["status"] == "completed"
    assert summary["eval/accuracy_last"] >= 0.85, summary
    assert ledger["generated"] == ledger["trained"] + ledger["queued"] + sum(ledger["dropped"].values()), ledger
    rows = [row for row in training.rows() if "train/loss" in row]
    assert max(row["rollout/version_lag_max"] for row in rows) <= 2
    assert "Traceback" not in training.log.read_text()
