"""Reinforcement-learning post-training with training and rollout inference as separate systems."""

__version__ = "0.1.0"
