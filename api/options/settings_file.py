"""Settings that stand in a file: YAML, TOML or JSON, by its suffix.

Such files may hold keys, so no error repeats a line of one.
"""

import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from prefixkv.errors import ConfigError


def read_settings(path: Path) -> dict[str, Any]:
    """Return the mapping that a file holds; an empty YAML file is an empty one.

    Raises:
        ConfigError: it cannot be read or is not what its suffix says; with the line where known.
    """
    parse = _PARSERS.get(path.suffix.lower())
    if parse is None:
        raise ConfigError(f"{path}: its name must end with one of {', '.join(_PARSERS)}")
    try:
        parsed = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or type(error).__name__}") from None
    except ValueError as error:  # of TOML, JSON and UTF-8, which say where and not what
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(parsed, Mapping) or not all(isinstance(name, str) for name in parsed):
        raise ConfigError(f"{path}: it must hold names with values, not a {type(parsed).__name__}")
    return dict(parsed)


def _parse_yaml(text: str) -> Any:
    import yaml  # not needed by those who write TOML, and by --help

    try:
        return yaml.safe_load(text) or {}
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ValueError(f"not YAML at line {line}") from None
    except yaml.YAMLError:
        raise ValueError("not YAML") from None


_PARSERS: dict[str, Callable[[str], Any]] = {
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
    ".toml": tomllib.loads,
    ".json": json.loads,
}
