"""Pydantic sections, flags and checks of a run; parsed before torch or ray is imported."""
