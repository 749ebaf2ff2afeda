"""Pure vocabulary of the system: no I/O, no ray, no torch."""
