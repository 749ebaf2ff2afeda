"""A Ray head with Ray's autoscaler and its fake node provider: nodes come and go as raylets on this machine.

`ray.cluster_utils.AutoscalingCluster` does the same, but it ends every Ray on the machine first (`ray stop --force`).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.cluster import processes

MARKER = "MILES_DISAGG_TEST_AUTOSCALER"


class AutoscalingRay:
    """See the module. `address` for `--ray-address`, `env` for whoever connects."""

    def __init__(self, address: str, env: dict[str, str], marker: str, log: Path):
        self.address, self.env, self._marker, self.log = address, env, marker, log

    def nodes(self) -> int:
        """Nodes that are up, without the head."""
        raylets = set(processes.with_text(self._marker)) & set(processes.with_text("raylet/raylet", "cmdline"))
        return len(raylets) - 1

    def until(self, nodes: int, seconds: float) -> None:
        """Wait for so many."""
        deadline = time.monotonic() + seconds
        while self.nodes() != nodes:
            assert time.monotonic() < deadline, f"{self.nodes()} nodes, not {nodes}:\n{self.log.read_text()[-3000:]}"
            time.sleep(0.2)


def config(workers: Mapping[str, Any], most: int, gcs: str, idle_seconds: float) -> dict[str, Any]:
    """An autoscaler's configuration in which one kind of node is added as it is needed."""
    head = {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}
    worker = {"resources": dict(workers), "node_config": {}, "min_workers": 0, "max_workers": most}
    # by its module: the type `fake_multinode` lacks a file of defaults in the wheel
    module = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
    provider = {"type": "external", "module": module, "use_node_id_as_ip": True, "gcs_address": gcs}
    provider |= {"disable_node_updaters": True, "disable_launch_config_check": True}
    commands = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
    return {
        "cluster_name": "fake",
        "max_workers": most,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": idle_seconds / 60,
        "provider": provider,
        "available_node_types": {"ray.head.default": head, "rollout": worker},
        "head_node_type": "ray.head.default",
        "auth": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "rsync_exclude": [],
        "rsync_filter": [],
        **{f"{name}_commands": [] for name in commands},
    }


@contextlib.contextmanager
def autoscaling_ray(root: Path, workers: Mapping[str, Any], most: int, idle_seconds: float) -> Iterator[AutoscalingRay]:
    """A running head; everything that it started is ended afterwards."""
    marker, short = uuid.uuid4().hex, Path("/tmp") / f"md{uuid.uuid4().hex[:6]}"  # socket paths must stay short
    bare = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    env = {**bare, MARKER: marker, "HOME": str(root), "RAY_AUTH_MODE": "token", "RAY_FAKE_CLUSTER": "1"}
    env |= {"AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "OMP_NUM_THREADS": "1"}
    ray = str(Path(sys.executable).with_name("ray"))
    subprocess.run([ray, "get-auth-token", "--generate"], env=env, check=True, capture_output=True, timeout=60)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"127.0.0.1:{port}"
    written, log = root / "autoscaler.json", root / "head.log"
    written.write_text(json.dumps(config(workers, most, address, idle_seconds)))
    with log.open("wb") as out:
        head = subprocess.Popen(
            [ray, "start", "--head", "--block", "--node-ip-address", "127.0.0.1", "--port", str(port),
             "--num-cpus", "0", "--include-dashboard", "false", "--disable-usage-stats",
             "--object-store-memory", str(100 << 20), "--autoscaling-config", str(written), "--temp-dir", str(short)],
            env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while socket.socket().connect_ex(("127.0.0.1", port)) != 0:
            assert head.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.3)
        cluster = AutoscalingRay(address, env, marker, log)
        cluster.until(0, 60.0)
        yield cluster
    finally:
        head.terminate()
        head.wait(timeout=60)
        for pid in processes.gone(marker, timeout=5):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(short, ignore_errors=True)
