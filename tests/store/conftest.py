"""Stores for the contract suite: a directory, S3 on moto, S3 on a real SeaweedFS server."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from werkzeug.serving import make_server

from miles_disagg.config.machine import free_port
from miles_disagg.store.base import ObjectStore, open_store

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any-secret", "AWS_REGION": "us-east-1"}
BUCKET = "miles"


@pytest.fixture(scope="session")
def moto_endpoint() -> Iterator[str]:
    """moto's S3, one request at a time: it tests and writes without a lock, so threads would both win a race."""
    from moto.server import DomainDispatcherApplication, create_backend_app

    server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=False)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    endpoint = f"http://127.0.0.1:{server.server_port}"
    client(endpoint).create_bucket(Bucket=BUCKET)
    yield endpoint
    server.shutdown()
    thread.join(10)


@pytest.fixture(scope="session")
def weed_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`weed server` with master, volume, filer and S3, every port ours, on loopback only."""
    base = tmp_path_factory.mktemp("weed")
    weed = Path(sys.executable).parent / "weed"
    names = ["master", "master.grpc", "volume", "volume.grpc", "filer", "filer.grpc", "s3", "s3.grpc"]
    ports = {name: free_port() for name in names}
    command = [str(weed), "server", f"-dir={base}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3"]
    for name, port in ports.items():
        part, _, kind = name.partition(".")
        command.append(f"-{part}.port{'.grpc' if kind else ''}={port}")
    command += [
        "-master.volumeSizeLimitMB=64",
        "-volume.max=20",
        "-s3.port.https=0",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
    ]
    with open(base / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    endpoint = f"http://127.0.0.1:{ports['s3']}"
    try:
        _wait_for(endpoint, process, base / "log")
        yield endpoint
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_for(endpoint: str, process: subprocess.Popen, log: Path) -> None:
    """Ready means that a bucket can be made and an object written: the filer is up long before the first volume is."""
    s3 = client(endpoint)
    error: Exception | None = None
    for _ in range(120):
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            urllib.request.urlopen(f"{endpoint}/status", timeout=2).read()
            s3.create_bucket(Bucket=BUCKET)
            s3.put_object(Bucket=BUCKET, Key="x", Body=b"x")
            return
        except Exception as e:
            error = e
            time.sleep(0.5)
    raise AssertionError(f"SeaweedFS is not ready: {error}\n{log.read_text()[-3000:]}")


def client(endpoint: str) -> Any:
    return boto3.client(
        "s3", endpoint_url=endpoint, aws_access_key_id="any", aws_secret_access_key="any", region_name="us-east-1"
    )


@pytest.fixture(params=["local", "moto", pytest.param("weed", marks=pytest.mark.s3)])
def new_store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], ObjectStore]:
    """A function that opens the same, initially empty, store again."""
    if request.param == "local":
        return lambda: open_store(str(tmp_path / "store"))
    endpoint = request.getfixturevalue(f"{request.param}_endpoint")
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    prefix = uuid.uuid4().hex
    return lambda: open_store(f"s3://{BUCKET}/{prefix}/store")


@pytest.fixture
def objects(new_store: Callable[[], ObjectStore]) -> ObjectStore:
    return new_store()
