"""Loading a checkpoint's tokenizer, without a network. Whether it fits the model is `source.check_tokenizer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from miles_disagg.domain.errors import ConfigError

# transformers makes an empty tokenizer of a directory without one.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load_tokenizer(path: Path) -> Any:
    """The checkpoint's tokenizer. Raises ConfigError if there is none, or it belongs to another model."""
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        raise ConfigError([f"--hf-checkpoint {path}: there is no tokenizer ({' or '.join(_TOKENIZER_FILES)})"])
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError([f"--hf-checkpoint {path}: no usable tokenizer: {reason}"]) from None
