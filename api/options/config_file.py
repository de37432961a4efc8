"""`--config FILE`: options in a file, beneath the environment, which is beneath the line."""

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer

from prefixkv.api.options.settings_file import read_settings
from prefixkv.errors import ConfigError


def load_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make the values of the file the defaults of the command's options.

    Raises:
        ConfigError: it cannot be read, or a name is not that of an option.
    """
    if path is not None:
        names = _parameters(context)
        defaults = context.default_map = {}
        for name, value in read_settings(path).items():
            parameter = names.get(name.replace("_", "-"))
            if parameter is None:
                raise ConfigError(f"{path}: no option is called {name!r}{_hint(name, names)}")
            if parameter.name in defaults:
                raise ConfigError(f"{path}: {name!r} sets an option that is already set")
            if value is not None:
                defaults[parameter.name] = _as_typed(path, name, value, parameter)
    return path


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        envvar="PREFIXKV_CONFIG",
        is_eager=True,  # before the options whose defaults it sets
        callback=load_config,
        help="YAML, TOML or JSON file of options under these names, without dashes in front. "
        "The environment wins over it, and the line over both.",
    ),
]


def _parameters(context: typer.Context) -> dict[str, Any]:
    """Return the options of the command by their long names."""
    return {
        name.removeprefix("--"): parameter
        for parameter in context.command.params
        for name in parameter.opts
        if name.startswith("--") and name not in ("--config", "--help")
    }


def _hint(name: str, names: Mapping[str, Any]) -> str:
    near = get_close_matches(name.replace("_", "-"), names)
    return f"; near it are {', '.join(near)}" if near else ""


def _as_typed(path: Path, name: str, value: object, parameter: Any) -> str | list[str]:
    """Return what would stand on the line, so that both are read alike."""
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(item, str | int | float) for item in values):
        raise ConfigError(f"{path}: {name!r} must be a text, a number, true or false, or a list")
    if getattr(parameter, "multiple", False):
        return [str(item) for item in values]
    if isinstance(value, list):
        raise ConfigError(f"{path}: {name!r} takes one value, not a list")
    return str(value)
