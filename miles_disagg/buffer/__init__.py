"""The bounded, staleness-aware data buffer between rollout and trainer."""
