"""What cannot work about weight synchronisation: modes, transports, encodings, places. Part of `checks`."""

from collections.abc import Iterator
from pathlib import Path

from miles_disagg.config.flags import flag
from miles_disagg.config.resolve import is_url
from miles_disagg.config.run import RunConfig

_PEER_DELTAS = (("nixl", "auto"), ("nixl", "always"))


def weights(config: RunConfig) -> Iterator[str]:
    """Problems of the weights section, each naming its flags and the remedy."""
    w, topology = config.weights, config.engines.topology
    short = w.update_weight_transfer_mode
    if short:
        transport = "disk" if short.startswith("disk") else short
        mode = w.update_weight_mode if short == "p2p" else "delta" if short == "disk-delta" else "full"
        implied = (mode, transport)
        for name, given, wanted in (
            ("--update-weight-mode", w.update_weight_mode, implied[0]),
            ("--update-weight-transport", w.update_weight_transport, implied[1]),
        ):
            if given not in (None, wanted):
                yield f"--update-weight-transfer-mode {short} means {name} {wanted}, not {given}: drop one of them"
    if config.trainer.colocate:
        yield "--colocate: trainer and engines are separate systems here; give each its own resources and drop it"
        if w.mode == "delta":
            yield "--colocate cannot be combined with --update-weight-mode delta: on one device weights are not sent"
    yield from _deltas(config)
    yield from _peer(config)
    if w.activation == "in-place" and (not w.publishes_deltas or topology == "service"):
        yield (
            "--activation in-place scatters deltas into engines that this run drives: add "
            "--update-weight-transfer-mode disk-delta, or drop it"
        )
    if w.update_weight_disk_keep_files and w.transport != "disk":
        yield (
            "--update-weight-disk-keep-files is for versions on disk: add --update-weight-transfer-mode disk-full, "
            "or drop it"
        )
    if w.update_weight_disk_keep_files and w.update_weight_keep_versions is not None:
        yield "--update-weight-disk-keep-files keeps every version, --update-weight-keep-versions does not: drop one"
    store, given = config.engines.version_store, w.update_weight_disk_dir
    if topology == "service" and w.transport == "broadcast":
        yield (
            "--rollout-endpoint needs weights through the store: add --update-weight-transfer-mode disk-delta "
            "(or disk-full)"
        )
    if store and given and given.rstrip("/") != _same_form(store, given):
        yield f"--version-store {store} and --update-weight-disk-dir {given} name different stores: drop the latter"
    if config.trainer.actor_num_nodes > 1 and w.transport == "disk" and not given and not store:
        yield "--update-weight-disk-dir is missing: with --actor-num-nodes above 1 give a path that every host sees"
    for name, place in (("--update-weight-disk-dir", given), ("--version-store", store)):
        if place and is_url(place) and not place.startswith(("s3://", "file://")):
            yield f"{name} {place}: only a directory, file:// and s3:// are supported"
    if w.update_weight_local_checkpoint_dir and is_url(w.update_weight_local_checkpoint_dir):
        yield "--update-weight-local-checkpoint-dir must be a local directory: an engine loads from it"
    if w.transport != "disk":
        for field in ("custom_update_weight_post_write_path", "custom_update_weight_pre_read_path"):
            if getattr(w, field):
                yield f"{flag(field)} is for versions on disk: add --update-weight-transfer-mode disk-delta, or drop it"


def _peer(config: RunConfig) -> Iterator[str]:
    w, engines = config.weights, config.engines
    if w.transport != "p2p":
        for field, default in {"update_weight_p2p_transport": "nixl", "update_weight_p2p_staging": "auto"}.items():
            if getattr(w, field) != default:
                yield f"{flag(field)} is for peer-to-peer updates: add --update-weight-transfer-mode p2p, or drop it"
        return
    if w.mode == "delta" and (w.update_weight_p2p_transport, w.update_weight_p2p_staging) not in _PEER_DELTAS:
        yield (
            "--update-weight-mode delta over --update-weight-transport p2p patches staging areas by one-sided writes: "
            "use --update-weight-p2p-transport nixl, and not --update-weight-p2p-staging never"
        )
    if engines.rollout_num_gpus and engines.rollout_num_gpus_per_engine > config.cluster.num_gpus_per_node:
        yield (
            f"--update-weight-transfer-mode p2p reaches engines on one node, but --rollout-num-gpus-per-engine "
            f"{engines.rollout_num_gpus_per_engine} spans nodes of --num-gpus-per-node "
            f"{config.cluster.num_gpus_per_node}: use --update-weight-transfer-mode broadcast, disk-full or disk-delta"
        )
    if engines.topology == "service":
        yield (
            "--update-weight-transfer-mode p2p writes into engines that this run knows, but --rollout-endpoint hides "
            "them: use --update-weight-transfer-mode disk-delta (or disk-full)"
        )


def _deltas(config: RunConfig) -> Iterator[str]:
    w, engines = config.weights, config.engines
    given, indices = w.update_weight_encoding, w.mode == "delta" and w.transport != "disk"
    if given is not None and w.mode == "full":
        yield (
            "--update-weight-encoding is for deltas on disk or --update-weight-mode delta over broadcast or p2p: add "
            "--update-weight-transfer-mode disk-delta, or drop it"
        )
    elif given is not None and (given == "indices") != indices:
        other = "indices" if indices else "sparse, sparse-max, xor or overwrite"
        yield f"--update-weight-encoding {given} cannot go over --update-weight-transport {w.transport}: use {other}"
    if w.update_weight_delta_level == "max" and given not in (None, "sparse", "sparse-max"):
        yield f"--update-weight-delta-level max is a level of sparse: drop it or --update-weight-encoding {given}"
    if not w.publishes_deltas:
        fields = {"update_weight_anchor_interval": None, "update_weight_keep_versions": None}
        for field, default in {**fields, "update_weight_delta_level": "standard"}.items():
            if getattr(w, field) != default:
                yield f"{flag(field)} is for deltas on disk: add --update-weight-transfer-mode disk-delta, or drop it"
        if w.update_weight_snapshot_device != "auto":
            yield (
                "--update-weight-snapshot-device is for deltas on disk: add --update-weight-transfer-mode disk-delta, "
                "or drop it"
            )
    elif w.update_weight_snapshot_device == "cuda" and w.encoding not in ("sparse", "sparse-max"):
        yield f"--update-weight-snapshot-device cuda: {w.encoding} is encoded on the CPU; use sparse or sparse-max"
    if w.update_weight_keep_versions is not None and w.update_weight_anchor_interval is None:
        yield (
            "--update-weight-keep-versions has no effect without --update-weight-anchor-interval: every version is "
            "built from the first; give both"
        )
    if w.update_weight_snapshot_device == "cuda" and config.trainer.trainer_device == "cpu":
        yield "--update-weight-snapshot-device cuda needs --trainer-device cuda: the trainer has no GPU to keep it on"
    stock = engines.topology == "attached" or engines.rollout_engine == "sglang"
    if indices and w.transport == "broadcast" and stock:
        yield (
            "--update-weight-mode delta over --update-weight-transport broadcast needs --rollout-engine embedded: "
            "stock SGLang has no hook for scattering what it receives from a process group; use "
            "--update-weight-transfer-mode disk-delta"
        )


def _same_form(store: str, given: str) -> str:
    """`store` made absolute if `given` is, so that a resolved configuration equals the one it came from."""
    absolute = not is_url(store) and Path(given).is_absolute()
    return (str(Path(store).expanduser().absolute()) if absolute else store).rstrip("/")
