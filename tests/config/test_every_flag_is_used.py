"""A flag that nothing reads would be ignored in silence."""

import re
from pathlib import Path

import pytest

from miles_disagg.config.flags import flag, section_of

PACKAGE = Path(__file__).parents[2] / "miles_disagg"


@pytest.fixture(scope="module")
def source() -> str:
    return "\n".join(path.read_text() for path in sorted(PACKAGE.rglob("*.py")))


@pytest.mark.parametrize("field", sorted(section_of()))
def test_every_flag_is_read_somewhere(field: str, source: str):
    """As an attribute (`config.pacing.schedule`); a declaration or a keyword is no reading."""
    assert re.search(rf"\.{field}\b(?! *=[^=])", source), f"nothing reads {flag(field)}"
