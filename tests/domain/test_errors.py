"""Errors cross process boundaries with everything they carry."""

from __future__ import annotations

import pickle

from miles_disagg.domain.errors import ChecksumMismatch, PointerConflict
from miles_disagg.domain.versions import VersionRef


def test_an_error_survives_pickling_with_both_sides() -> None:
    error = pickle.loads(pickle.dumps(PointerConflict(None, VersionRef("a", 1), VersionRef("b", 2))))
    assert (error.expected, error.actual, error.proposed) == (None, VersionRef("a", 1), VersionRef("b", 2))
    assert "a/weight_v000001" in str(error)


def test_keyword_only_fields_survive_too() -> None:
    error = pickle.loads(pickle.dumps(ChecksumMismatch("aa", "bb", file="f", tensor="t")))
    assert (error.expected, error.actual, error.file, error.tensor) == ("aa", "bb", "f", "t")
