"""Megatron-core models, weight conversion and parallel state."""
