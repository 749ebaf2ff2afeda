"""What the commands refuse, tokens, TLS, the live page, late joiners, cut networks and stores that do not answer."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
import time
import uuid
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import aiohttp
import pytest

from miles_disagg import cli
from miles_disagg.config.service import ServiceConfig, check_service
from miles_disagg.domain.errors import SampleRejected
from miles_disagg.domain.versions import Constraint
from miles_disagg.gateway import app as gateway_app
from miles_disagg.gateway.app import GatewaySettings
from miles_disagg.replica import app as replica_app
from miles_disagg.replica.listen import TlsFiles
from miles_disagg.replica.reconciler import Reconciler, ReconcilerSettings
from miles_disagg.replica.replica import Replica, ReplicaSettings
from miles_disagg.replica.staging import DiskStager
from miles_disagg.rollout.base import SamplingOptions
from miles_disagg.rollout.pool import RolloutClient
from miles_disagg.store.base import open_store
from miles_disagg.store.versions import VersionStore
from miles_disagg.store.watch import PollingSource
from tests.fakes.engine import FakeEngine
from tests.fakes.fault_proxy import fault_proxy
from tests.fakes.publishing import FakeTrainer, on_disk, raw, step, tiny_tensors, write_base
from tests.fakes.replica import RUN, make_replica, ref
from tests.fakes.samples import make_prompt
from tests.fakes.source import FakeStore
from tests.fakes.tcp_proxy import tcp_proxy
from tests.store.conftest import BUCKET, CREDENTIALS, moto_endpoint  # noqa: F401 - a fixture

FAST = ReconcilerSettings(poll=0.2, engine_check=0.05, store=5.0, backoff_first=0.05, backoff_cap=0.3)


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.02)


# --- what is refused before anything starts ------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("gateway --host 0.0.0.0", "give --auth-token-file"),
        ("gateway --tls-cert a.pem", "--tls-cert and --tls-key go together"),
        ("gateway --auth-token-file /none/token", "/none/token: No such file"),
        ("gateway --wait 0", "--wait must be above 0"),
        ("gateway --run-id a/b", "--run-id"),
        ("replica --engine x:1 --store s --gateway http://g --local-checkpoint-dir d", "--engine x:1 is not an http"),
        ("replica --engine http://x --store s --gateway g --local-checkpoint-dir d", "--gateway g is not an http"),
        ("replica --engine http://x --store gs://b --gateway http://g --local-checkpoint-dir d", "--store"),
        ("replica --engine http://x --store s --gateway http://g --local-checkpoint-dir d --base-checkpoint /none",
         "--base-checkpoint /none"),
        ("replica --engine http://x --store s --gateway http://g --local-checkpoint-dir d --relay-zone eu",
         "--relay-zone has no effect without --relay"),
        ("gateway --canary-interval 5", "--canary-interval has no effect without --canary-ids"),
        ("gateway --canary-ids 5 -1", "--canary-ids 5 -1: must be token ids"),
        ("serve --canary-interval 5", "--canary-interval has no effect without --canary-ids"),
        ("serve --relay-zone eu", "--relay-zone has no effect without --relay"),
        ("serve --min-replicas 3 --max-replicas 2", "--min-replicas 3 is above --max-replicas 2"),
        ("serve", "--version-store is missing"),
        ("serve --gateway-host 0.0.0.0", "--gateway-host 0.0.0.0 is reachable"),
        ("serve --drain-seconds -1", "--drain-seconds is -1, must be above 0"),
        ("serve --config /none.yaml", "/none.yaml: No such file"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_by_name(argv: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv.split()) == 2
    err = capsys.readouterr().err
    assert says in err
    assert "Traceback" not in err


def test_the_example_configuration_is_sound_and_a_dry_run_starts_nothing(checkpoint: Path, capsys) -> None:
    argv = ["serve", "--config", "configs/service.yaml", "--base-checkpoint", str(checkpoint), "--gateway-port", "0"]
    assert cli.main([*argv, "--dry-run"]) == 0
    assert "1 to 2 replica(s), each a placement group of {1 CPU}" in capsys.readouterr().out
    assert check_service(ServiceConfig(version_store="s3://b/p", base_checkpoint=str(checkpoint), gateway_port=0)) == []


# --- token, TLS, page ----------------------------------------------------------------------------


async def test_everything_but_health_and_the_empty_page_asks_for_the_token() -> None:
    gateway = await gateway_app.serve(token="secret-token")
    try:
        async with aiohttp.ClientSession() as client:
            for path, status in (
                ("/", 200),
                ("/health", 503),
                ("/fleet", 401),
                ("/server_info", 401),
                ("/metrics", 401),
            ):
                async with client.get(gateway.url + path) as response:
                    assert response.status == status, path
            for path, status in (("/generate", 401), ("/replicas", 401), ("/pause_generation", 401)):
                async with client.post(gateway.url + path, json={}) as response:
                    assert response.status == status, path
            headers = {"Authorization": "Bearer secret-token"}
            async with client.get(f"{gateway.url}/fleet", headers=headers) as response:
                assert (await response.json())["replicas"] == []
    finally:
        await gateway.stop()


async def test_requests_go_over_tls_from_client_to_replica(tmp_path: Path, monkeypatch) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days"]
    make += ["2", "-keyout", str(key), "-out", str(cert), "-subj", "/CN=localhost"]
    subprocess.run([*make, "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"], check=True, capture_output=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    tls = TlsFiles(str(cert), str(key))
    trusted = ssl.create_default_context(cafile=str(cert))
    monkeypatch.setattr(
        "aiohttp.connector._SSL_CONTEXT_VERIFIED", trusted
    )  # made at import, before the variable was set
    replica = make_replica(FakeEngine(str(ref(3))))
    await replica.attach()
    gateway = await gateway_app.serve(tls=tls.context())
    server = await replica_app.serve(replica, gateways=(gateway.url,), tls=tls.context(), heartbeat_seconds=0.1)
    assert gateway.url.startswith("https://")
    try:
        await until(lambda: bool(gateway.router.members))
        async with RolloutClient(gateway.url, run_id=RUN) as client:
            sample = await one(client, "r")
        assert sample.version_start == 3
    finally:
        await server.stop()
        await gateway.stop()


def one(client: RolloutClient, rid: str):
    sampling = SamplingOptions(max_new_tokens=4)
    return client.generate(make_prompt(), sampling, Constraint(min_version=0), sample_id=rid, group_id="g", rid=rid)


async def test_the_live_page_shows_the_fleet_in_a_browser(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium on this machine (apt-get install chromium)")
    store = FakeStore(ref(3))
    replicas = [Replica(ReplicaSettings(f"replica-{i}"), FakeEngine(str(ref(3)))) for i in range(2)]
    loops = [Reconciler(replica, store, store, settings=FAST) for replica in replicas]
    gateway = await gateway_app.serve()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(gateway.stop)
        for replica, loop in zip(replicas, loops, strict=True):
            await replica.attach()
            server = await replica_app.serve(replica, loop, gateways=(gateway.url,), heartbeat_seconds=0.1)
            stack.push_async_callback(server.stop)
        await until(lambda: [m.applied for m in gateway.router.members] == [3, 3])
        loops[1].hold(3, 600.0)
        store.publish(ref(4))
        await until(lambda: sorted(m.applied or 0 for m in gateway.router.members) == [3, 4])
        dom = await shown_by(browser, f"{gateway.url}/", tmp_path)
    assert "2 of 2" in dom
    row = {name: dom.partition(f"<td>{name}</td>")[2].partition("</tr>")[0] for name in ("replica-0", "replica-1")}
    assert ">run 4<" in row["replica-0"]
    assert ">run 3<" in row["replica-1"]
    assert "held, ready" in row["replica-1"]
    assert dom.count("<polyline") == 3, "newest, oldest and newest served"
    assert "<b>3 to 4</b><span>versions served" in dom
    assert "<b>0</b><span>waiting for a version" in dom
    assert '<b id="pauses">1, half at most' in dom
    assert '<b id="lags">1, half at most' in dom
    assert dom.count("<rect") == 2 * 17


async def shown_by(browser: str, url: str, profile: Path) -> str:
    """The page's DOM after some seconds of its own time."""
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-dev-shm-usage", f"--user-data-dir={profile}"]
    command += ["--virtual-time-budget=4000", "--dump-dom", url]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("<script>")[0]


# --- joining late, and faults on the way ------------------------------------------------------------


async def test_a_replica_that_joins_at_version_40_loads_once(tmp_path: Path) -> None:
    tensors = tiny_tensors(size=16)
    write_base(tmp_path / "base", tensors)
    trainer = FakeTrainer(open_store(str(tmp_path / "store")), tmp_path / "base", RUN, ranks=1)
    await trainer.claim()
    for version in range(1, 41):
        tensors = step(tensors, version)
        await trainer.publish(tensors)
    engine = FakeEngine()
    replica = make_replica(engine)
    assert await replica.attach() is None
    store = VersionStore(open_store(str(tmp_path / "store")))
    stager = DiskStager(store, tmp_path / "replica", tmp_path / "base", reader="late", workers=1)
    loop = asyncio.create_task(Reconciler(replica, PollingSource(store), stager, settings=FAST).run())
    await until(lambda: replica.applied == ref(40))
    loop.cancel()
    assert engine.paths == [str(next((tmp_path / "replica").glob("weights-*")))]
    assert on_disk(Path(engine.paths[0])) == raw(tensors)
    stager.close()


async def test_a_store_that_does_not_answer_costs_time_and_no_request(
    tmp_path: Path,
    moto_endpoint: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": moto_endpoint}.items():
        monkeypatch.setenv(name, value)
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    tensors = tiny_tensors(size=16)
    write_base(tmp_path / "base", tensors)
    trainer = FakeTrainer(open_store(url), tmp_path / "base", RUN, ranks=1)
    await trainer.claim()
    with fault_proxy(moto_endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        store = VersionStore(open_store(url))
        replica = make_replica(FakeEngine())
        await replica.attach()
        stager = DiskStager(store, tmp_path / "replica", tmp_path / "base", reader="r", workers=1)
        reconciler = Reconciler(replica, PollingSource(store, slowest=0.2), stager, settings=FAST)
        gateway = await gateway_app.serve()
        server = await replica_app.serve(replica, reconciler, gateways=(gateway.url,), heartbeat_seconds=0.1)
        try:
            await until(lambda: replica.applied == ref(0) and bool(gateway.router.members))
            proxy.faults = lambda method, path: "403"
            await trainer.publish(step(tensors, 1))
            await until(lambda: reconciler.last_error is not None)
            async with RolloutClient(gateway.url, run_id=RUN) as client:
                samples = [await one(client, f"r{i}") for i in range(5)]
            assert {s.version_end for s in samples} == {0}
            proxy.faults = lambda method, path: None
            await until(lambda: replica.applied == ref(1))
        finally:
            await server.stop()
            await gateway.stop()
            stager.close()


async def test_a_network_that_cuts_and_truncates_loses_and_doubles_no_sample() -> None:
    engine = FakeEngine(str(ref(3)), token_delay=0.01)
    replica = make_replica(engine)
    await replica.attach()
    gateway = await gateway_app.serve(settings=GatewaySettings(expiry=30.0))
    server = await replica_app.serve(replica, gateways=(gateway.url,), heartbeat_seconds=0.2)
    faults = ["cut", "refuse", "truncate", "delay", None, "cut", "truncate", "refuse", None]
    rejected = 0
    async with tcp_proxy(int(gateway.url.rpartition(":")[2])) as proxy:
        proxy.fault = lambda n: faults[n % len(faults)]
        await until(lambda: bool(gateway.router.members))
        async with RolloutClient(proxy.url, run_id=RUN, least_pause=0.02) as client:

            async def sample(i: int):
                nonlocal rejected
                while True:
                    with suppress(SampleRejected):  # half an answer that looks whole is no sample either
                        return await one(client, f"r{i}")
                    rejected += 1

            cutting = asyncio.create_task(cut_now_and_then(proxy.cut_all))
            samples = await asyncio.gather(*(sample(i) for i in range(12)))
            cutting.cancel()
    await server.stop()
    await gateway.stop()
    assert [s.sample_id for s in samples] == [f"r{i}" for i in range(12)]
    assert all(len(s.tokens) == 4 for s in samples)
    assert replica.sessions.totals["requests"] >= 12
    assert client.refusals + rejected > 0, "no fault was met"


async def cut_now_and_then(cut: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(0.4)
        cut()
