"""The trainer side of a weight update."""
