"""API keys: whose each is, and how one that a client shows is recognised.

A key is kept as its SHA-256 only. Each has a cache salt, so tenants share nothing unless the
operator gives two of them the same salt.
"""

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field

from prefixkv.api.access.tenant import ANONYMOUS, Tenant
from prefixkv.errors import ConfigError

ADMIN_NAME = "admin"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key by its digest, and the tenant who holds it."""

    digest: bytes = field(repr=False)
    tenant: Tenant


class ApiKeys:
    """The keys that a server knows; without any, all may use it but for the routes of operators.

    Raises:
        ConfigError: two keys are the same, or have the same name, or one has the name of those who
            show none.
    """

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        self._keys = tuple(keys)
        names = [key.tenant.name for key in self._keys]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"API keys need names of their own; given twice: {repeated}")
        if ANONYMOUS.name in names:
            raise ConfigError(f"an API key is named {ANONYMOUS.name!r}, as who shows none")
        owners: dict[bytes, str] = {}
        for key in self._keys:
            name = key.tenant.name
            if (other := owners.setdefault(key.digest, name)) != name:
                raise ConfigError(f"the API keys {other!r} and {name!r} are the same key")

    @property
    def are_required(self) -> bool:
        """Whether a request needs a key: the admin's alone does not close the server."""
        return not all(key.tenant.is_admin for key in self._keys)

    @property
    def have_admin(self) -> bool:
        """Whether there is an admin key."""
        return any(key.tenant.is_admin for key in self._keys)

    def find(self, shown: bytes) -> Tenant | None:
        """Return who holds the key `shown`.

        Takes the same time for every key: all digests are compared, each in constant time.
        """
        digest = hashlib.sha256(shown).digest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key.tenant
        return found

    def __repr__(self) -> str:
        return f"ApiKeys({', '.join(key.tenant.name for key in self._keys)})"


def key_digest(key: str) -> bytes:
    """Return what is kept of a key.

    Raises:
        ConfigError: no client could send it; the message does not repeat it.
    """
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError("an API key must be printable ASCII without spaces, and not empty")
    return hashlib.sha256(key.encode()).digest()


def make_key(
    name: str,
    digest: bytes,
    *,
    salt: str | None = None,
    max_requests: int | None = None,
    is_admin: bool = False,
) -> ApiKey:
    """Return a key; without a salt it gets one that follows from the key and from nothing else."""
    if salt is None:
        salt = hashlib.sha256(b"prefixkv cache salt:" + digest).hexdigest()
    return ApiKey(digest, Tenant(name, salt, max_requests, is_admin))
