"""`python train_async.py` as a process of its own: Ctrl-C, a second start, refusals, and submission as a Ray job."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from miles_disagg.config.machine import free_port
from tests.cluster import processes

ROOT = Path(__file__).resolve().parents[2]
MARKER = "MILES_DISAGG_TEST_RUN"


def flags(checkpoint: Path, run_dir: Path, *more: str) -> list[str]:
    task = () if "--prompt-data" in more else ("--task", "addition", "--task-size", "64", "--eval-task-size", "16")
    return [
        *("--hf-checkpoint", str(checkpoint), *task),
        *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "6"),
        *("--train-dtype", "fp32", "--lr", "1e-4", "--max-weight-staleness", "2", "--trainer-device", "cpu"),
        *("--update-weight-transfer-mode", "disk-delta", "--run-dir", str(run_dir)),
        *more,
    ]


class Run:
    """A training run in a process group of its own, as a shell would start it; its tree carries a marker."""

    def __init__(self, checkpoint: Path, run_dir: Path, *more: str):
        self.run_dir, self.marker = run_dir, uuid.uuid4().hex
        env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        self.log = run_dir.with_suffix(".log")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "train_async.py", *flags(checkpoint, run_dir, *more)],
                cwd=ROOT,
                env={**env, MARKER: self.marker, "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background shell ignores it
            )

    def wait_for_steps(self, n: int, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        metrics = self.run_dir / "metrics.jsonl"
        while not metrics.exists() or len(metrics.read_text().splitlines()) < n:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)

    def wait(self, timeout: float) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise AssertionError(f"still running after {timeout} s:\n{self.log.read_text()}") from None

    @property
    def rows(self) -> list[str]:
        return (self.run_dir / "metrics.jsonl").read_text().splitlines()

    @property
    def summary(self) -> dict:
        return json.loads((self.run_dir / "summary.json").read_text())


def test_ctrl_c_ends_everything_and_the_same_run_directory_can_be_used_at_once(tiny_checkpoint, tmp_path):
    store = ("--update-weight-disk-dir", str(tmp_path / "weights"))
    first = Run(tiny_checkpoint, tmp_path / "run", "--num-rollout", "1000", *store)
    first.wait_for_steps(2, timeout=180)
    os.killpg(first.process.pid, signal.SIGINT)  # what a terminal does
    assert first.wait(timeout=90) == 130, first.log.read_text()
    assert first.summary["status"] == "interrupted"
    ledger = first.summary["ledger"]
    accounted = ledger["trained"] + ledger["queued"] + sum(ledger["dropped"].values()) + ledger["in_flight"]
    assert ledger["generated"] == accounted, ledger
    assert processes.gone(first.marker, timeout=20) == []

    second = Run(tiny_checkpoint, tmp_path / "again", "--num-rollout", "1", *store)
    assert second.wait(timeout=180) == 0, second.log.read_text()
    assert second.summary["status"] == "completed"
    assert second.summary["final_version"] == 1
    assert processes.gone(second.marker, timeout=20) == []
    assert "Traceback" not in first.log.read_text() + second.log.read_text()


@pytest.mark.slow
def test_a_second_run_on_a_publication_directory_in_use_is_refused(tiny_checkpoint, tmp_path):
    store = ("--update-weight-disk-dir", str(tmp_path / "weights"))
    first = Run(tiny_checkpoint, tmp_path / "one", "--num-rollout", "1000", *store)
    try:
        first.wait_for_steps(1, timeout=180)
        second = Run(tiny_checkpoint, tmp_path / "two", "--num-rollout", "1", *store)
        assert second.wait(timeout=90) != 0
        assert "claimed by" in second.log.read_text() or "--update-weight-disk-dir" in second.log.read_text()
        assert not (tmp_path / "two" / "metrics.jsonl").exists() or not (tmp_path / "two" / "metrics.jsonl").read_text()
        first.wait_for_steps(3, timeout=60)
    finally:
        first.process.terminate()  # what a supervisor does
    assert first.wait(timeout=90) == 130
    assert processes.gone(first.marker, timeout=20) == []


@pytest.mark.slow
def test_a_run_is_submitted_as_a_ray_job_with_token_authentication(tiny_checkpoint, tmp_path, tmp_path_factory):
    marker, short = uuid.uuid4().hex, Path("/tmp") / f"md{uuid.uuid4().hex[:6]}"  # socket paths must stay short
    bare = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    env = {**bare, MARKER: marker, "HOME": str(tmp_path), "RAY_AUTH_MODE": "token"}
    ray = str(Path(sys.executable).with_name("ray"))
    subprocess.run([ray, "get-auth-token", "--generate"], env=env, check=True, capture_output=True, timeout=60)
    ports = [str(free_port()) for _ in range(3)]
    head = subprocess.Popen(
        [ray, "start", "--head", "--block", "--port", ports[0], "--dashboard-port", ports[1], "--num-cpus", "4",
         "--dashboard-agent-listen-port", ports[2], "--dashboard-host", "127.0.0.1", "--disable-usage-stats",
         "--temp-dir", str(short)],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        wait_for_port(int(ports[1]), head, timeout=120)
        submit = [ray, "job", "submit", "--address", f"http://127.0.0.1:{ports[1]}", "--working-dir", ".", "--"]
        entry = [sys.executable, "train_async.py", *flags(tiny_checkpoint, tmp_path / "run", "--num-rollout", "2")]
        done = subprocess.run([*submit, *entry], cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert (summary["status"], summary["steps"]) == ("completed", 2)
    finally:
        head.terminate()
        head.wait(timeout=60)
        for pid in processes.gone(marker, timeout=20):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(short, ignore_errors=True)


def wait_for_port(port: int, process: subprocess.Popen, timeout: float) -> None:
    import socket

    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        assert process.poll() is None, process.stdout and process.stdout.read()
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.3)
    raise AssertionError(f"nothing listens on {port} after {timeout} s")
