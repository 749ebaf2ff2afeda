"""Rows of prompt data on disk: JSON Lines, Parquet, and directories as Hugging Face's `datasets` leaves them.

What a row means is `source`. `datasets` itself is not needed; everything but JSON Lines needs pyarrow.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from miles_disagg.domain.errors import PromptDataError


def read_rows(path: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Rows with their 1-based number. PromptDataError names the file and the line.

    A `.jsonl` or `.parquet` file; what `Dataset.save_to_disk` wrote (a directory with `state.json`); or a directory of
    Parquet files of one split, as in a data set's repository.
    """
    file = Path(path)
    if file.is_dir():
        yield from _read_directory(file)
    elif not file.is_file():
        raise PromptDataError("no such file; check --prompt-data", file=path)
    elif file.suffix == ".parquet":
        yield from _read_parquet(file)
    elif file.suffix in (".jsonl", ".json"):
        yield from _read_jsonl(file)
    else:
        raise PromptDataError(
            f"{file.suffix or 'no suffix'}: only .jsonl and .parquet are read, and data set directories", file=path
        )


def _read_jsonl(file: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with file.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            if not raw.strip():
                continue
            try:
                row = json.loads(raw)
            except ValueError as error:
                raise PromptDataError(f"not valid JSON ({error})", file=str(file), line=number) from error
            if not isinstance(row, dict):
                raise PromptDataError("not a JSON object", file=str(file), line=number)
            yield number, row


def _read_parquet(file: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        import pyarrow.parquet as parquet  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise _no_pyarrow(file) from error
    try:
        number = 0
        for batch in parquet.ParquetFile(file).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except (OSError, ValueError) as error:
        raise PromptDataError(f"not a readable Parquet file ({error})", file=str(file)) from error


def _read_directory(directory: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """A saved data set, or Parquet files of one split; a directory of several splits is an error that lists them."""
    if (directory / "state.json").is_file():
        yield from _read_saved(directory)
        return
    if (directory / "dataset_dict.json").is_file():
        splits = sorted(p.parent.name for p in directory.glob("*/state.json"))
        raise PromptDataError(f"has the splits {', '.join(splits)}: give one, {directory}/SPLIT", file=str(directory))
    files = sorted(directory.glob("*.parquet")) or sorted(directory.glob("data/*.parquet"))
    if not files:
        raise PromptDataError("is a directory with neither a saved data set nor Parquet files", file=str(directory))
    splits = sorted({file.name.removesuffix(".parquet").split("-")[0] for file in files})
    if len(splits) > 1:
        raise PromptDataError(f"has files of {', '.join(splits)}: give the file of one", file=str(directory))
    number = 0
    for file in files:
        for _, row in _read_parquet(file):
            number += 1
            yield number, row


def _read_saved(directory: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """What `Dataset.save_to_disk` wrote: Arrow streams, listed in `state.json`."""
    try:
        import pyarrow.ipc as ipc  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise _no_pyarrow(directory) from error
    try:
        names = [entry["filename"] for entry in json.loads((directory / "state.json").read_text())["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise PromptDataError(f"state.json does not list its files ({error!r})", file=str(directory)) from error
    number = 0
    for name in names:
        if Path(name).name != name:
            raise PromptDataError(f"state.json lists {name!r}, which is no name of a file in it", file=str(directory))
        try:
            with (directory / name).open("rb") as file, ipc.open_stream(file) as stream:
                for batch in stream:
                    for row in batch.to_pylist():
                        number += 1
                        yield number, row
        except (OSError, ValueError) as error:
            raise PromptDataError(f"not a readable Arrow file ({error})", file=str(directory / name)) from error


def _no_pyarrow(file: Path) -> PromptDataError:
    return PromptDataError("needs pyarrow: pip install 'miles-disagg[data]', or give JSONL", file=str(file))
