"""Whom a request belongs to: what it shares with others, and what it may use."""

from dataclasses import dataclass, field

from starlette.requests import Request

SCOPE_KEY = "prefixkv.tenant"


@dataclass(frozen=True, slots=True)
class Tenant:
    """The owner of an API key.

    Attributes:
        name: shown in logs and metrics; never the key.
        salt: which the server binds to the key; None where all share.
        max_requests: that may run or wait at once; None means any number.
        is_admin: whether it may use the routes of operators.
    """

    name: str = "anonymous"
    salt: str | None = field(default=None, repr=False)
    max_requests: int | None = None
    is_admin: bool = False

    def salt_for(self, wanted: str | None) -> str | None:
        """Return the salt of a request that asks for `wanted`.

        The server's own always counts. What a client asks for divides it further: two salts of one
        tenant never share, and no client can name another tenant's.
        """
        if self.salt is None:
            return None if wanted is None else f"client:{wanted}"
        inner = "" if wanted is None else f":{wanted}"
        return f"tenant:{len(self.salt)}:{self.salt}{inner}"


ANONYMOUS = Tenant()


def tenant_of(request: Request) -> Tenant:
    """Return the tenant that the check of keys found; without keys everybody is the same one."""
    tenant = request.scope.get(SCOPE_KEY, ANONYMOUS)
    assert isinstance(tenant, Tenant)
    return tenant
