"""From a command line and YAML files to a RunConfig, and from a RunConfig to YAML.

Precedence: flag, then file (the last `--config` wins), then the saved configuration of a run that is continued (--load,
--resume auto), then default. Only types and names are checked here; whether
the values make sense together is `checks`.
"""

import difflib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import tyro
import yaml
from pydantic import ValidationError

from miles_disagg.config.run import RunConfig
from miles_disagg.domain.errors import ConfigError

SGLANG_PREFIX = "sglang_"
CONFIG_FILE = "config.yaml"
"""Name of the saved configuration in a run directory."""
_UNSAVED = ("dry_run", "load", "resume")


@cache
def section_of() -> dict[str, str]:
    """Section name by field name. Field names are unique over all sections, so flags need no prefix."""
    owner: dict[str, str] = {}
    for section, info in RunConfig.model_fields.items():
        section_class: Any = info.annotation
        for field in section_class.model_fields:
            if field in owner:
                raise TypeError(f"flag {field!r} is declared in sections {owner[field]!r} and {section!r}")
            owner[field] = section
    return owner


def flag(field: str) -> str:
    """`rollout_batch_size` -> `--rollout-batch-size`."""
    return "--" + field.replace("_", "-")


def flag_names() -> list[str]:
    """Every flag of a run, sorted."""
    return sorted(["--config", *(flag(field) for field in section_of() if field != "sglang_args")])


def parse_run(argv: Sequence[str], prog: str = "miles-disagg train") -> RunConfig:
    """Parse a command line. Unknown flags and bad values print a remedy and exit with status 2.

    Raises ConfigError for problems in a YAML file, all of them at once.
    """
    argv, files = take_config_files(list(argv))
    argv, passed = _take_sglang(argv)
    config = _parse(argv, load_files(files), prog)
    continued = _continued(config)
    if continued is not None:
        config = _parse(argv, load_files([str(continued / CONFIG_FILE), *files]), prog)
        config = config.replace(load=str(continued), run_dir=str(continued))
    config = config.replace(sglang_args={**config.engines.sglang_args, **passed}) if passed else config
    return _weights_for_a_service(config)


def _continued(config: RunConfig) -> Path | None:
    """Directory of the run that this configuration continues, if it is one."""
    output = config.output
    if output.load:
        given = output.load
    elif output.resume == "auto" and output.run_dir:
        given = output.run_dir
    else:
        return None
    run_dir = Path(given).expanduser().absolute()
    return run_dir if (run_dir / CONFIG_FILE).is_file() else None


def _parse(argv: Sequence[str], config: RunConfig, prog: str) -> RunConfig:
    return tyro.cli(
        RunConfig,
        prog=prog,
        args=argv,
        default=config,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.HelptextFromCommentsOff),
    )


def _weights_for_a_service(config: RunConfig) -> RunConfig:
    """A rollout service only reads its store: where nothing is said about weights, deltas go there."""
    w = config.weights
    said = w.update_weight_transfer_mode or w.update_weight_mode or w.update_weight_transport
    if config.engines.topology != "service" or said:
        return config
    return config.replace(update_weight_transfer_mode="disk-delta")


def load_files(paths: Sequence[str]) -> RunConfig:
    """Defaults under the given YAML files, later files over earlier ones. Raises ConfigError."""
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    problems: list[str] = []
    for path in paths:
        try:
            read = _flatten(read_yaml(path), path)
        except ConfigError as error:
            problems.extend(error.problems)
            continue
        if "sglang_args" in read:
            read["sglang_args"] = {**values.get("sglang_args", {}), **read["sglang_args"]}
        values |= read
        origin |= dict.fromkeys(read, path)
    nested: dict[str, dict[str, Any]] = {}
    for field, value in values.items():
        nested.setdefault(section_of()[field], {})[field] = value
    try:
        config = RunConfig.model_validate(nested)
    except ValidationError as error:
        for item in error.errors():
            field = str(item["loc"][1])
            problems.append(f"{origin[field]}: {flag(field)}: {item['msg']}, got {item['input']!r}")
        raise ConfigError(problems) from None
    if problems:
        raise ConfigError(problems)
    return config


def to_yaml(config: RunConfig) -> str:
    """The configuration as YAML, by section; `--config` on it gives an equal configuration."""
    data = config.model_dump(mode="json")
    for field in _UNSAVED:
        data[section_of()[field]].pop(field)
    return yaml.safe_dump(data, sort_keys=False, width=120)


def save_config(config: RunConfig, path: Path) -> None:
    """Write `to_yaml(config)` to `path`, whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(to_yaml(config), encoding="utf-8")
    temporary.replace(path)


def closest(name: str, known: Sequence[str]) -> str:
    """`; perhaps you meant X` for the nearest of `known`, or nothing."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; perhaps you meant {near[0]}" if near else ""


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key_node.value} twice", key_node.start_mark)
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: str) -> Mapping[str, Any]:
    """A YAML mapping; ConfigError names the file."""
    try:
        data = yaml.load(Path(path).read_text(encoding="utf-8"), _StrictLoader)
    except OSError as error:
        raise ConfigError([f"--config {path}: {error.strerror or error}"]) from None
    except UnicodeDecodeError:
        raise ConfigError([f"--config {path}: is not UTF-8 text"]) from None
    except yaml.YAMLError as error:
        raise ConfigError([f"--config {path}: not valid YAML: {' '.join(str(error).split())}"]) from None
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        raise ConfigError([f"--config {path}: must be a mapping of flag names to values, not a {type(data).__name__}"])
    return data


def _flatten(data: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Field values of a file whose keys are flag names (with `-` or `_`), optionally grouped by section."""
    out: dict[str, Any] = {}
    problems: list[str] = []

    def put(field: str, value: Any) -> None:
        if field in out:
            problems.append(f"{path}: {field} is given twice")
        out[field] = value

    passed: dict[str, tuple[str, ...]] = {}
    for key, value in _entries(data):
        field = key.replace("-", "_")
        if field == "sglang_args" and isinstance(value, Mapping):
            passed |= {_server_name(str(name)): _server_values(item) for name, item in value.items()}
        elif field in section_of():
            put(field, value)
        elif field.startswith(SGLANG_PREFIX):
            passed[_server_name(field.removeprefix(SGLANG_PREFIX))] = _server_values(value)
        else:
            known = [*section_of(), *RunConfig.model_fields]
            problems.append(f"{path}: unknown key {key}{closest(field, known)}")
    if passed:
        put("sglang_args", {name: values for name, values in passed.items() if values is not None})
    if problems:
        raise ConfigError(problems)
    return out


def _entries(data: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Keys and values with section names taken away; a key in the wrong section is still that flag."""
    entries: list[tuple[str, Any]] = []
    for key, value in data.items():
        if key in RunConfig.model_fields and isinstance(value, Mapping):
            entries.extend((str(k), v) for k, v in value.items())
        elif key in RunConfig.model_fields and value is None:
            continue
        else:
            entries.append((str(key), value))
    return entries


def _server_name(name: str) -> str:
    return name.replace("_", "-")


def _server_values(value: Any) -> Any:
    """A YAML value as command-line words; `true` is a bare switch, `false` and null leave the argument out."""
    if value is True:
        return ()
    if value is False or value is None:
        return None
    return tuple(str(item) for item in value) if isinstance(value, list) else (str(value),)


def take_config_files(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split `--config FILE` off a command line: the rest, and the files in order."""
    rest: list[str] = []
    files: list[str] = []
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if name != "--config":
            rest.append(word)
            continue
        path = value if equals else next(words, "")
        if not path or (not equals and path.startswith("--")):
            raise ConfigError(["--config: needs the path of a YAML file"])
        files.append(path)
    return rest, files


def _take_sglang(argv: list[str]) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """Split off `--sglang-NAME VALUE...` where it is no flag of ours."""
    rest: list[str] = []
    passed: dict[str, tuple[str, ...]] = {}
    current: str | None = None
    for word in argv:
        name, equals, value = word.partition("=")
        field = name.removeprefix("--").replace("-", "_")
        if word.startswith("--"):
            ours = not field.startswith(SGLANG_PREFIX) or field in section_of()
            current = None if ours else _server_name(field.removeprefix(SGLANG_PREFIX))
            if current is not None:
                passed[current] = (value,) if equals else ()
                continue
        if current is None:
            rest.append(word)
        else:
            passed[current] += (word,)
    return rest, passed
