"""Weight synchronisation: what is published, over which transport, in which encoding, and where it lands."""

from typing import Literal

from miles_disagg.config.base import PositiveInt, Section

UpdateMode = Literal["full", "delta"]
Transport = Literal["broadcast", "disk"]


class WeightsConfig(Section):
    """How engines get new weights."""

    update_weight_transfer_mode: Literal["broadcast", "disk-delta", "disk-full", "p2p"] | None = None
    """Short form of the two flags below."""
    update_weight_mode: UpdateMode | None = None
    """Publish complete weights or the changes only; unset: full."""
    update_weight_transport: Transport | None = None
    """Process group between trainer and engines, or a directory / S3 prefix; unset: broadcast."""
    update_weight_encoding: Literal["xor", "overwrite", "sparse", "sparse-max"] | None = None
    """Encoding of deltas on disk; xor and overwrite are read by miles and slime too; unset: xor."""
    update_weight_delta_checksum: Literal["xxh3-128", "blake3", "adler32"] = "xxh3-128"
    """Digest of each tensor's complete target state."""
    update_weight_disk_dir: str | None = None
    """Publication root, a directory or S3 prefix that every rollout host sees; unset: RUN_DIR/weights."""
    update_weight_local_checkpoint_dir: str | None = None
    """Rollout-host-local directory for materialized checkpoints; unset: RUN_DIR/replicas."""
    update_weight_disk_keep_files: bool = False
    """Keep full versions on disk after every reader has acknowledged them."""
    update_weight_anchor_interval: PositiveInt | None = None
    """With deltas, publish a full version every N versions; unset: only the base is one."""
    update_weight_buffer_size: PositiveInt = 512 * 1024**2
    """Bytes of an export or broadcast bucket."""

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
        return "disk" if (self.update_weight_transfer_mode or "").startswith("disk") else "broadcast"

    @property
    def publishes_deltas(self) -> bool:
        """True for delta versions on disk, the only ones that have an encoding and anchors."""
        return self.mode == "delta" and self.transport == "disk"

    @property
    def encoding(self) -> Literal["xor", "overwrite", "sparse", "sparse-max"]:
        """Encoding of deltas on disk."""
        return self.update_weight_encoding or "xor"
