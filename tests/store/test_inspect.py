"""`miles-disagg store`: what it lists is there, what it verifies is right, what it exports transformers loads."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch

from miles_disagg.domain.versions import VersionRef
from miles_disagg.store.inspect import main
from miles_disagg.store.leases import take_lease
from miles_disagg.store.local import LocalStore
from miles_disagg.store.versions import VersionStore
from tests.fakes.publishing import FakeTrainer, Tensors, on_disk, raw, step, tiny_tensors, write_base


@pytest.fixture
async def world(tmp_path: Path) -> tuple[Path, Path, list[Tensors]]:
    """(store, base, weights by version): xor, sparse, full, xor."""
    versions = [tiny_tensors(size=32)]
    write_base(tmp_path / "base", versions[0])
    trainer = FakeTrainer(LocalStore(tmp_path / "store"), tmp_path / "base", "run")
    await trainer.claim()
    for encoding in ("xor", "overwrite", None, "xor"):
        versions.append(step(versions[-1], len(versions)))
        await trainer.publish(versions[-1], encoding)
    return tmp_path / "store", tmp_path / "base", versions


def last_json(text: str) -> dict:
    return json.loads(text.strip().splitlines()[-1])


def test_ls_lists_every_version_with_its_size(world, capsys) -> None:
    store, _, _ = world
    assert main(["ls", str(store), "--json"]) == 0
    found = last_json(capsys.readouterr().out)
    assert found["latest"] == "run/weight_v000004"
    (run,) = found["runs"]
    assert run["live"] is True
    assert [(v["kind"], v["base_version"]) for v in run["versions"]] == [
        ("xor", 0), ("overwrite", 1), ("full", None), ("xor", 3),
    ]  # fmt: skip
    assert all(v["nbytes"] > 0 and v["files"] == 2 and v["published"] for v in run["versions"])
    assert main(["ls", str(store)]) == 0
    assert "overwrite on 1" in capsys.readouterr().out


def test_show_prints_the_index_and_the_way_to_build_it(world, capsys) -> None:
    store, _, _ = world
    assert main(["show", str(store), "--version", "4"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plan"] == {"start": "anchor", "at": 3, "deltas": ["run/weight_v000004"]}
    assert found["metadata"]["delta_encoding"] == "xor"


def test_verify_recomputes_the_lineage_from_the_base_or_from_an_anchor(world, capsys) -> None:
    store, base, _ = world
    assert main(["verify", str(store), "--base", str(base), "--json"]) == 0
    assert last_json(capsys.readouterr().out)["right"] == [str(VersionRef("run", v)) for v in range(5)]
    assert main(["verify", str(store), "--json"]) == 0
    assert last_json(capsys.readouterr().out)["right"] == [str(VersionRef("run", v)) for v in (3, 4)]
    assert main(["verify", str(store), "--version", "2"]) == 1
    assert "--base" in capsys.readouterr().err


@pytest.mark.parametrize("version", [2, 3])
def test_verify_names_the_first_bad_tensor(world, capsys, version: int) -> None:
    store, base, _ = world
    name = "model.layers.0.self_attn.q_proj.weight"
    ref = VersionRef("run", version)
    index = VersionStore(LocalStore(store)).index(ref)
    assert index is not None
    shard = store / str(ref) / index.weight_map[name]
    data = bytearray(shard.read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    begin, end = (8 + int.from_bytes(data[:8], "little") + o for o in header[name]["data_offsets"])
    data[(begin + end) // 2] ^= 0xFF
    shard.write_bytes(data)
    assert main(["verify", str(store), "--base", str(base), "--json"]) == 1
    captured = capsys.readouterr()
    found = last_json(captured.out)
    assert found["tensor"] == name
    assert found["right"] == [str(VersionRef("run", v)) for v in range(version)]
    assert name in captured.err


def test_export_writes_any_version_as_a_plain_checkpoint(world, tmp_path: Path, capsys) -> None:
    store, base, versions = world
    for version in (0, 2, 4):
        out = tmp_path / f"out{version}"
        arguments = ["--base", str(base), "--output", str(out), "--version", str(version)]
        assert main(["export", str(store), *arguments]) == 0
        assert on_disk(out) == raw(versions[version])
        assert (out / "config.json").is_file()
    assert main(["export", str(store), "--base", str(base), "--output", str(tmp_path / "out0")]) == 1
    assert "exists" in capsys.readouterr().err


async def test_an_exported_version_loads_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=True, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).bfloat16()
    model.save_pretrained(tmp_path / "base")
    trainer = FakeTrainer(LocalStore(tmp_path / "store"), tmp_path / "base", "run", ranks=1)
    trainer.sources[0].source._companions = ()
    await trainer.claim()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    exported = {n: t for n, t in model.state_dict().items() if n != "lm_head.weight"}
    await trainer.publish(exported, "xor")
    arguments = ["--base", str(tmp_path / "base"), "--output", str(tmp_path / "out")]
    assert main(["export", str(tmp_path / "store"), *arguments]) == 0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    wanted = model.state_dict()
    assert loaded.state_dict().keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in loaded.state_dict().items())
    assert loaded(torch.arange(8)[None]).logits.isfinite().all()


def test_gc_says_first_and_removes_then(world, capsys) -> None:
    store, _, _ = world
    assert main(["gc", str(store), "--keep", "1", "--dry-run"]) == 0
    assert "would remove versions [1, 2]" in capsys.readouterr().out
    assert VersionStore(LocalStore(store)).versions("run") == [1, 2, 3, 4]
    assert main(["gc", str(store), "--keep", "1"]) == 0
    assert VersionStore(LocalStore(store)).versions("run") == [3, 4]


def test_looking_changes_nothing_and_stray_files_are_no_versions(world, capsys) -> None:
    store, _, _ = world
    take_lease(LocalStore(store), "run", "gone", target=4, have=None, ttl=60)
    os.utime(store / "run" / "leases" / "gone.json", (time.time() - 70, time.time() - 70))
    for name in ("weight_v1", "weight_v000004-copy", "notes"):
        (store / "run" / name).mkdir()
        (store / "run" / name / "model.safetensors").write_bytes(b"x")
    files = sorted(store.rglob("*"))
    for command in (["ls"], ["show"], ["verify"], ["gc", "--keep", "1", "--dry-run"]):
        assert main([command[0], str(store), *command[1:]]) == 0, capsys.readouterr().err
    assert sorted(store.rglob("*")) == files
    assert "lease" not in capsys.readouterr().out


def test_an_export_holds_a_lease_unless_the_store_may_only_be_read(world, tmp_path: Path, monkeypatch) -> None:
    store, base, versions = world
    taken, put = [], LocalStore.put

    def watched(self: LocalStore, key: str, *args, **kwargs) -> None:
        taken.append(key)
        put(self, key, *args, **kwargs)

    monkeypatch.setattr(LocalStore, "put", watched)
    command = ["export", str(store), "--base", str(base), "--output"]
    assert main([*command, str(tmp_path / "plain"), "--no-lease"]) == 0
    assert taken == []
    assert main([*command, str(tmp_path / "leased")]) == 0
    (key,) = taken
    assert key.startswith("run/leases/checkout-")
    assert on_disk(tmp_path / "leased") == on_disk(tmp_path / "plain") == raw(versions[4])
    assert list((store / "run").glob("leases/*")) == []


def test_an_empty_or_damaged_store_is_told_in_one_line(tmp_path: Path, capsys) -> None:
    assert main(["verify", str(tmp_path)]) == 1
    assert "latest.json" in capsys.readouterr().err
    assert main(["ls", str(tmp_path)]) == 0
    (tmp_path / "latest.json").write_text("{")
    assert main(["ls", str(tmp_path)]) == 1
    assert "latest.json" in capsys.readouterr().err
