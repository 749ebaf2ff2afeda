"""Checkpoints, digests and deltas: safetensors in, bytes out."""
