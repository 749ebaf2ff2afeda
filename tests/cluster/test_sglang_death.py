"""A managed SGLang server killed in the middle of a run that activates in place: back in step, and in place again."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from miles_disagg.cluster.assemble import assembled
from miles_disagg.config.placement import plan_placement
from miles_disagg.observe.console import RunConsole
from tests.cluster import processes
from tests.cluster.steps import publish_step
from tests.engine import sglang_env

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]


async def status_when(run, what, seconds: float = 300.0) -> dict:
    """The engine's status once `what(status)` holds."""
    deadline = time.monotonic() + seconds
    while True:
        rows = await run.fleet.status()
        if rows and what(rows[0]):
            return rows[0]
        assert time.monotonic() < deadline, rows
        await asyncio.sleep(0.5)


@pytest.fixture
def bf16_checkpoint(tmp_path):
    """As `tiny_checkpoint`, in bfloat16: a small step changes few of its elements, so that patches stay sparse."""
    import torch

    from miles_disagg.prompts.quickstart import Recipe, make_model, make_tokenizer

    path = tmp_path / "bf16"
    make_model(Recipe(hidden_size=64, layers=2)).to(torch.bfloat16).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def kill_server(run) -> None:
    """SIGKILL the server itself; its guard ends what it started."""
    servers = set(processes.with_text("sglang.launch_server", "cmdline"))
    servers &= set(processes.with_text(f"{run.config.run_id}/weight", "cmdline"))
    servers -= set(processes.with_text("guard.py", "cmdline"))
    assert servers
    for pid in servers:
        os.kill(pid, signal.SIGKILL)


async def train_through_a_kill(config) -> list[dict]:
    """Loader reports just before the kill, when the engine is back in step, and at the end."""
    reports, published = list[dict](), list[dict]()
    config.run_dir.mkdir(parents=True, exist_ok=True)
    async with assembled(config, plan_placement(config), RunConsole("test", config.num_rollout)) as run:
        await run.start_generation()
        for step in run.steps:
            batch, metrics = await publish_step(run, step)
            await run.settle()
            published.append(await run.trainer.digests())
            if step == 1:
                reports.append((await status_when(run, lambda s: s["applied"] == run.version))["loader"])
                kill_server(run)
                back = await status_when(run, lambda s: s["restarts"] == 1 and s["applied"] == run.version)
                reports.append(back["loader"])
                assert await run.fleet.digests() == [published[-1]], "it came back with other weights"
            await run.report(step, batch, metrics)
        status = await status_when(run, lambda s: s["applied"] == run.version)
        reports.append(status["loader"])
        assert await run.fleet.digests() == [published[-1]]
        assert all(a != b for a, b in zip(published, published[1:], strict=False)), "versions that change nothing"
        await run.close_books()
    return reports


def test_a_killed_server_comes_back_into_the_current_version_and_goes_on_in_place(
    local_ray, run_config, bf16_checkpoint
):
    config = run_config(
        *("--hf-checkpoint", str(bf16_checkpoint)),
        *("--rollout-engine", "sglang", "--sglang-python", str(sglang_env.python()), "--activation", "in-place"),
        *("--update-weight-transfer-mode", "disk-delta", "--num-rollout", "5", "--lr", "2e-6"),
        *("--entropy-coef", "0.01"),  # untrained, it is never rewarded: something has to move it
        *("--engine-start-timeout", "300", "--pause-generation-mode", "in_place", "--rollout-request-timeout", "600"),
    )
    before, back, after = asyncio.run(train_through_a_kill(config))
    assert (before["in_place"], before["reloads"]) == (2, 0), before
    assert back["mode"] == "in-place", "the map was not recorded anew"
    assert back["reloads"] == 1, back
    assert after["in_place"] == before["in_place"] + 3, after
    assert after["reloads"] == 1, after
