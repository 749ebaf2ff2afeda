"""A gateway or a replica (on a fake engine) as a process of its own: `python -m tests.fakes.serve_role ...`.

Prints its URL once it listens; ends when its standard input closes.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from miles_disagg.gateway import app as gateway_app
from miles_disagg.gateway.app import GatewaySettings
from miles_disagg.replica import app as replica_app
from miles_disagg.replica.replica import Replica, ReplicaSettings
from tests.fakes.engine import FakeEngine


class RoleProcess:
    """A child that serves `role`; see the module. `signal` sends it a signal."""

    def __init__(self, role: str, *args: str):
        root = Path(__file__).parents[2]
        command = [sys.executable, "-m", "tests.fakes.serve_role", role, *args]
        environment = {**os.environ, "PYTHONPATH": str(root)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=root, text=True
        )
        self.url = ""

    async def ready(self) -> str:
        """Wait for its URL."""
        assert self.process.stdout is not None
        self.url = (await asyncio.to_thread(self.process.stdout.readline)).strip()
        assert self.url, "the process ended before it listened"
        return self.url

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


async def main(role: str, *args: str) -> None:
    if role == "gateway":
        port = int(args[0])
        url = (await gateway_app.serve(port=port, settings=GatewaySettings(wait=10.0, expiry=1.0))).url
    else:
        replica_id, version, gateways = args
        replica = Replica(ReplicaSettings(replica_id), FakeEngine(version, token_delay=0.005))
        await replica.attach()
        url = (await replica_app.serve(replica, gateways=tuple(gateways.split(",")), heartbeat_seconds=0.2)).url
    print(url, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
