"""Where API keys come from: options, and the file that `--api-key-file` names.

[[keys]]
name = "alice"            # in logs and metrics
key = "sk-..."            # or sha256 = "...", the key's digest in hexadecimal
salt = "team-a"           # optional; keys of one salt share what is cached
max_requests = 8          # optional; that may run or wait at once
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prefixkv.api.access.api_keys import ADMIN_NAME, ApiKey, ApiKeys, key_digest, make_key
from prefixkv.api.options.settings_file import read_settings
from prefixkv.errors import ConfigError


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    name: Annotated[str, Field(pattern=r"^[\w.@-]{1,64}$")]
    key: str | None = None
    sha256: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")] | None = None
    salt: Annotated[str, Field(min_length=1)] | None = None
    max_requests: Annotated[int, Field(ge=1)] | None = None

    def digest(self) -> bytes:
        if self.key is not None and self.sha256 is None:
            return key_digest(self.key)
        if self.sha256 is not None and self.key is None:
            return bytes.fromhex(self.sha256)
        raise ConfigError("exactly one of key and sha256 must be there")


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    keys: list[_Entry]


def read_key_file(path: Path, *, max_requests: int | None = None) -> list[ApiKey]:
    """Return the keys of a file.

    Args:
        path: of a TOML, JSON or YAML file.
        max_requests: of those keys that set none of their own.

    Raises:
        ConfigError: naming the entry, and never a key or a salt.
    """
    try:
        entries = _File.model_validate(read_settings(path)).keys
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path}: {where}: {first['msg']}") from None
    return [_made(path, entry, max_requests) for entry in entries]


def _made(path: Path, entry: _Entry, max_requests: int | None) -> ApiKey:
    try:
        digest = entry.digest()
    except ConfigError as error:
        raise ConfigError(f"{path}: key {entry.name!r}: {error}") from None
    limit = max_requests if entry.max_requests is None else entry.max_requests
    return make_key(entry.name, digest, salt=entry.salt, max_requests=limit)


def collect_keys(
    keys: Sequence[str], file: Path | None, admin_key: str | None, max_requests: int | None = None
) -> ApiKeys:
    """Return all keys that the options of a server name; those of the line are numbered.

    Args:
        keys: each of a tenant of its own.
        file: of further keys.
        admin_key: which may also use the routes of operators, without a limit.
        max_requests: that each key may run or wait at once, where the file does not say else.

    Raises:
        ConfigError: two keys are the same or have one name, or one cannot be a key, or a limit has
            nothing to limit.
    """
    known = [
        make_key(f"key-{number}", key_digest(key), max_requests=max_requests)
        for number, key in enumerate(dict.fromkeys(keys), start=1)
    ]
    if file is not None:
        known += read_key_file(file, max_requests=max_requests)
    if max_requests is not None and not known:
        raise ConfigError(f"a limit of {max_requests} requests per key needs API keys")
    if admin_key is not None:
        known.append(make_key(ADMIN_NAME, key_digest(admin_key), is_admin=True))
    return ApiKeys(known)
