"""Pydantic sections, flags and checks of a run; parsed and checked before torch or ray is imported."""
