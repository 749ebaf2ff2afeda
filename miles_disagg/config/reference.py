"""The table of all flags in docs/configuration.md, made from the sections themselves.

`python -m miles_disagg.config.reference FILE` rewrites the part of FILE between its two markers.
"""

import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from miles_disagg.config.flags import flag
from miles_disagg.config.run import RunConfig

BEGIN, END = "<!-- flags: begin -->", "<!-- flags: end -->"


def reference() -> str:
    """One Markdown table for each section: flag, values, default, meaning."""
    parts = []
    for section, info in RunConfig.model_fields.items():
        section_class: Any = info.annotation
        parts.append(
            f"### {section}\n\n{section_class.__doc__}\n\n| flag | values | default | meaning |\n|---|---|---|---|"
        )
        for field, item in section_class.model_fields.items():
            if field != "sglang_args":
                row = (f"`{flag(field)}`", _values(item.annotation), _default(item.get_default()), item.description)
                parts.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |")
        parts.append("")
    return "\n".join(parts).strip()


def rewrite(path: Path) -> None:
    """Put the current table into `path`."""
    text = path.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    path.write_text(f"{head}{BEGIN}\n\n{reference()}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")


def _values(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if hasattr(annotation, "__metadata__"):
        return _values(annotation.__origin__)
    parts = [part for part in get_args(annotation) if part is not type(None)]
    if get_origin(annotation) is tuple:
        return f"{_values(parts[0])} ..."
    if parts:
        return ", ".join(_values(part) for part in parts)
    return {"int": "integer", "str": "text", "bool": "on / off", "float": "number"}.get(annotation.__name__, "text")


def _default(value: Any) -> str:
    if value is None or value == ():
        return "unset"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{value}`"


if __name__ == "__main__":
    rewrite(Path(sys.argv[1]))
