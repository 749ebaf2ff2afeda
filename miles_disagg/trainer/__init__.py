"""The optimizer step: losses, advantages and the Megatron-core backend."""
