"""Salts of tenants: what a client asks for divides them further, and never reaches another's."""

from itertools import product

from prefixkv.api.access.tenant import ANONYMOUS, Tenant


def test_without_a_key_the_clients_salt_is_the_salt() -> None:
    assert ANONYMOUS.salt_for(None) is None
    assert ANONYMOUS.salt_for("a") == "client:a"


def test_no_two_of_tenant_and_wish_share_a_salt() -> None:
    names = ["a", "b", "ab", "a:b", "1:a", "", "tenant:1:a", "tenant:1:a:b"]
    tenants = [ANONYMOUS, *(Tenant("t", salt) for salt in names)]
    wishes = [None, *names]
    pairs = list(product(tenants, wishes))
    salts = {tenant.salt_for(wish) for tenant, wish in pairs}
    assert len(salts) == len(pairs)


def test_the_salt_is_not_shown() -> None:
    assert "secret" not in repr(Tenant("t", "secret"))
