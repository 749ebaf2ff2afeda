"""The engine side of a weight update: gate, staging, activation, reconciler."""
