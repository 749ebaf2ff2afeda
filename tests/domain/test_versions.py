"""Version references, constraints, pointer rules and token spans."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_disagg.domain.errors import InvalidConstraint, InvalidVersionRef, PointerConflict
from miles_disagg.domain.versions import (
    Constraint,
    TokenSpan,
    VersionRef,
    check_advance,
    normalise_spans,
    parse_engine_version,
    token_versions,
)

run_ids = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,20}", fullmatch=True)
refs = st.builds(VersionRef, run_ids, st.integers(0, 10**8))


@given(refs)
def test_a_reference_survives_printing_and_parsing(ref):
    assert VersionRef.parse(str(ref)) == ref


@pytest.mark.parametrize(
    "text",
    [
        "",
        "run",
        "run/weight_v7",
        "run/weight_v0000-1",
        "../x/weight_v000001",
        "run/base",
        "run/weight_v000001/x",
        "a..b/weight_v000001",
    ],
)
def test_an_unparseable_reference_is_an_error_and_never_the_base(text):
    with pytest.raises(InvalidVersionRef):
        VersionRef.parse(text)


@given(refs, run_ids)
def test_a_stamp_of_another_run_is_never_taken_for_ours(ref, other):
    assert parse_engine_version(str(ref), ref.run_id) == ref.version
    if other != ref.run_id:
        assert parse_engine_version(str(ref), other) is None
    assert parse_engine_version("default", ref.run_id) is None


@given(refs, st.integers(-5, 5))
def test_the_pointer_only_moves_forward_within_a_run(ref, step):
    proposed = VersionRef(ref.run_id, max(ref.version + step, 0))
    if proposed.version > ref.version:
        check_advance(ref, proposed, ref)
    else:
        with pytest.raises(PointerConflict):
            check_advance(ref, proposed, ref)


def test_a_writer_with_a_wrong_belief_is_told_both_sides():
    a, b = VersionRef("run", 3), VersionRef("run", 4)
    with pytest.raises(PointerConflict, match="weight_v000003.*weight_v000004|weight_v000004.*weight_v000003"):
        check_advance(b, VersionRef("run", 5), a)


@pytest.mark.parametrize(
    "value",
    [3, "min", [], {"min_version": -1}, {"min_version": True}, {"min_version": 1.5}, {"max_version": 1},
     {"min_version": 1, "exact_version": 1}, {"exact_version": None}],
)  # fmt: skip
def test_a_malformed_constraint_names_the_field(value):
    with pytest.raises(InvalidConstraint, match="weight_version"):
        Constraint.from_json(value)


@given(st.integers(0, 100), st.integers(0, 100))
def test_a_constraint_never_admits_an_older_version(wanted, served):
    assert Constraint(min_version=wanted).satisfied_by(served) == (served >= wanted)
    assert Constraint(exact_version=wanted).satisfied_by(served) == (served == wanted)
    assert not Constraint(min_version=wanted).satisfied_by(None)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), min_size=1, max_size=8))
def test_normalised_spans_attribute_every_token_as_before(pieces):
    spans, position = [], 0
    for length, version in pieces:
        spans.append(TokenSpan(position, version))
        position += length
    out = normalise_spans(spans, position)
    assert token_versions(out, position) == token_versions(spans, position)
    assert out[0].first_token == 0
    if position:
        assert all(a.version != b.version and a.first_token < b.first_token for a, b in zip(out, out[1:], strict=False))
