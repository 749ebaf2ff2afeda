"""Weight synchronisation: what is published, over which transport, in which encoding, and where it lands."""

from typing import Literal

from miles_disagg.config.base import PositiveInt, Section

UpdateMode = Literal["full", "delta"]
Transport = Literal["broadcast", "disk", "p2p"]
Encoding = Literal["xor", "overwrite", "sparse", "sparse-max", "indices"]


class WeightsConfig(Section):
    """How engines get new weights."""

    update_weight_transfer_mode: Literal["broadcast", "disk-delta", "disk-full", "p2p"] | None = None
    """Short form of the two flags below."""
    update_weight_mode: UpdateMode | None = None
    """Publish complete weights or the changes only; unset: full."""
    update_weight_transport: Transport | None = None
    """Process group between trainer and engines, a directory / S3 prefix, or straight from every trainer rank to every
    engine rank; unset: broadcast."""
    update_weight_encoding: Encoding | None = None
    """Encoding of deltas; miles and slime read xor and overwrite; unset: sparse on disk, indices over broadcast."""
    update_weight_delta_level: Literal["standard", "max"] = "standard"
    """max sends sparse-max instead of sparse: fewer bytes for more work, for links between regions."""
    update_weight_delta_checksum: Literal["xxh3-128", "blake3", "adler32"] = "xxh3-128"
    """Digest of each tensor's complete target state."""
    update_weight_disk_dir: str | None = None
    """Publication root, a directory or S3 prefix that every rollout host sees; unset: RUN_DIR/weights."""
    update_weight_local_checkpoint_dir: str | None = None
    """Rollout-host-local directory for materialized checkpoints; unset: RUN_DIR/replicas."""
    activation: Literal["auto", "in-place", "reload"] = "auto"
    """How an engine gets a delta's version: reload the checkpoint, or scatter the changed elements into the live
    weights; auto: in-place where the engine can, and says so at start."""
    update_weight_disk_keep_files: bool = False
    """Keep every version on disk after every reader has acknowledged it."""
    update_weight_anchor_interval: PositiveInt | Literal["auto"] | None = None
    """With deltas, write a full version beside every N-th one, or (auto) when it pays; unset: only the base is one."""
    update_weight_keep_versions: PositiveInt | None = None
    """With deltas, remove what the newest N versions are not built from; unset: what every reader has passed."""
    update_weight_snapshot_device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where a source keeps the bytes it published last; auto: on its GPU where they fit, else pinned host memory."""
    custom_update_weight_post_write_path: str | None = None
    """package.module.function called with the version after its files are written, for mounts that need a push."""
    custom_update_weight_pre_read_path: str | None = None
    """package.module.function called with the version before its files are read, for mounts that need a refresh."""
    update_weight_buffer_size: PositiveInt = 512 * 1024**2
    """Bytes of an export or broadcast bucket, or of a peer-to-peer write."""
    update_weight_p2p_transport: Literal["nixl", "torch"] = "nixl"
    """What carries peer-to-peer updates: NIXL's one-sided writes, or torch.distributed sends and receives."""
    update_weight_p2p_staging: Literal["auto", "always", "never"] = "auto"
    """Whether an engine receives beside its live weights while it serves, and is paused for a local copy only; never:
    the transfer itself is under the pause; auto: where memory allows, and says so at start."""

    @property
    def mode(self) -> UpdateMode:
        """full or delta, with the short form applied."""
        if self.update_weight_mode:
            return self.update_weight_mode
        return "delta" if self.update_weight_transfer_mode == "disk-delta" else "full"

    @property
    def transport(self) -> Transport:
        """broadcast or disk, with the short form applied."""
        if self.update_weight_transport:
            return self.update_weight_transport
        short = self.update_weight_transfer_mode or "broadcast"
        return "disk" if short.startswith("disk") else "p2p" if short == "p2p" else "broadcast"

    @property
    def publishes_deltas(self) -> bool:
        """True for delta versions on disk, the only ones that have levels, anchors and retention."""
        return self.mode == "delta" and self.transport == "disk"

    @property
    def encoding(self) -> Encoding | None:
        """Encoding of what is published; None for full versions."""
        if self.mode == "full":
            return None
        given = self.update_weight_encoding or ("sparse" if self.transport == "disk" else "indices")
        return "sparse-max" if given == "sparse" and self.update_weight_delta_level == "max" else given
