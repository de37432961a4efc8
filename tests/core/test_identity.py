"""Identities never encode alike, and digests do not depend on the process."""

import itertools
import os
import subprocess
import sys
from array import array
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.errors import InvalidRequest
from prefixkv.hashing import chain_digest, pack_tokens, root_digest, unpack_tokens
from prefixkv.identity import ModelIdentity

texts = st.sampled_from(["", "a", "b", "ab", "abc", "bc", "c"])
maybe = st.none() | texts
identities = st.builds(
    ModelIdentity,
    architecture=texts,
    kv_dtype=texts,
    layout=texts,
    adapter_name=maybe,
    salt=maybe,
    config_digest=texts.map(str.encode),
    weights_fingerprint=texts.map(str.encode),
    adapter_fingerprint=maybe.map(lambda t: t.encode() if t is not None else None),
    weights_epoch=st.integers(0, 12),
    block_size=st.integers(0, 12),
)


@given(identities, identities)
def test_only_equal_identities_encode_alike(a: ModelIdentity, b: ModelIdentity) -> None:
    """However their untagged fields would run together."""
    assert (a.canonical == b.canonical) == (a == b)


def test_crafted_fields_do_not_collide() -> None:
    """A salt that spells an adapter's name, None against the empty string, shifted borders."""
    pairs = [(None, None), ("", None), (None, ""), ("ab", "c"), ("a", "bc"), ("abc", None)]
    pairs += [(None, "abc"), ("adapter", "salt"), ("salt", "adapter")]
    encoded = {
        ModelIdentity(architecture="m", adapter_name=name, salt=salt).canonical
        for name, salt in pairs
    }
    assert len(encoded) == len(pairs)


@pytest.mark.parametrize("name", [field.name for field in fields(ModelIdentity)])
def test_every_field_separates(name: str) -> None:
    """No field is left out of the encoding."""
    base = ModelIdentity(architecture="m")
    values: list[Any] = ["x", b"x", 1]
    changed = [replace(base, **{name: value}) for value in values]
    assert len({identity.canonical for identity in (base, *changed)}) == 4


def test_the_salt_is_not_shown() -> None:
    """It is a secret of the tenant; logs may hold a repr."""
    assert "s3cret" not in repr(ModelIdentity(architecture="m", salt="s3cret"))


def test_an_epoch_makes_another_identity() -> None:
    """Replaced weights never find what the old ones computed."""
    identity = ModelIdentity(architecture="m", salt="s")
    assert identity.at_epoch(0) is identity
    assert identity.at_epoch(1).canonical != identity.canonical
    assert identity.at_epoch(1).salt == "s"


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_digests_are_the_same_in_every_process(seed: str) -> None:
    """Nothing depends on Python's own string hashes."""
    code = (
        "from prefixkv.identity import ModelIdentity\n"
        "from prefixkv.hashing import *\n"
        "i = ModelIdentity(architecture='m', salt='s', adapter_name=None)\n"
        "print(chain_digest(root_digest(i.canonical) + pack_tokens([1, 2, 3])).hex())"
    )
    env = {**os.environ, "PYTHONHASHSEED": seed}
    printed = subprocess.run(
        [sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, check=True
    ).stdout.strip()
    identity = ModelIdentity(architecture="m", salt="s", adapter_name=None)
    here = chain_digest(root_digest(identity.canonical) + pack_tokens([1, 2, 3]))

    assert printed == here.hex()
    assert len(here) == 16  # full width, never cut


def test_different_chains_have_different_digests() -> None:
    """The digest covers the parent: the same tokens after another beginning are another chain."""
    root = root_digest(b"identity")
    chains = [list(c) for n in range(5) for c in itertools.product([0, 1, 256], repeat=n)]
    digests = set()
    for chain in chains:
        digest = root
        for token in chain:
            digest = chain_digest(digest + pack_tokens([token]))
        digests.add(digest)
    assert len(digests) == len(chains)


@given(st.lists(st.integers(0, 2**31 - 1)))
def test_packing_keeps_every_token(tokens: list[int]) -> None:
    """Ids are packed at full width."""
    packed = pack_tokens(tokens)
    assert len(packed) == 4 * len(tokens)
    assert unpack_tokens(packed) == tokens
    assert pack_tokens(packed) is packed


@pytest.mark.parametrize("tokens", [[-1], [0, 2**31], array("i", [5, -1]), [1.5], ["a"]])
def test_what_is_no_token_id_is_refused(tokens: Any) -> None:
    """Whatever it comes in: an array of ints is looked at as well."""
    with pytest.raises(InvalidRequest, match=r"token ids must be integers in \[0, 2\*\*31\)"):
        pack_tokens(tokens)
