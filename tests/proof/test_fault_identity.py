"""Identity: what others took for the same, or forgot to tell apart.

Kinds of faults that broke other systems; docs/faults.md lists them all.
"""

import ast
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_world import IDENTITIES, World
from tiny_models import tiny_engine, tiny_model

import prefixkv
import prefixkv.api
import prefixkv.kernels
from prefixkv import ModelIdentity, PrefixCache, Sequence

MODEL = IDENTITIES[0]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.mark.parametrize(
    "name", [field.name for field in fields(ModelIdentity) if field.name != "weights_epoch"]
)
def test_blocks_of_identities_that_differ_in_one_field_are_not_shared(name: str) -> None:
    """Whichever field it is; the epoch is the cache's own and has its own test."""
    value = {int: 7, bytes: b"x"}.get(type(getattr(MODEL, name)), "x")
    changed: Any = {name: value}
    cache = PrefixCache(num_blocks=16, block_size=4)
    found = []
    for identity in (MODEL, replace(MODEL, **changed)) * 2:
        sequence = Sequence.open(cache, identity, [0, 1, 0, 1, 0, 1])
        found.append(sequence.num_tokens)
        assert sequence.reserve(6)
        sequence.write([0, 1, 0, 1, 0, 1][sequence.num_tokens :])
        cache.take_copies()
        sequence.commit()
        sequence.release()
    assert found == [0, 0, 5, 5]


def test_keys_are_made_in_one_place() -> None:
    """Only the prefix cache digests chains, and only the engine says what they depend on."""
    sources = [
        path
        for package in (prefixkv, prefixkv.api, prefixkv.kernels)
        for path in Path(package.__path__[0]).rglob("*.py")
    ]
    users: dict[str, set[str]] = {}
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                users.setdefault(f"{node.func.id}()", set()).add(path.stem)
            if isinstance(node, ast.Name):
                users.setdefault(node.id, set()).add(path.stem)

    assert len(sources) > 60
    assert users["chain_digest"] == {"hashing", "prefix_cache"}
    assert users["root_digest()"] == {"prefix_cache"}
    assert users["ModelIdentity()"] == {"engine"}
    assert "hash()" not in users


def test_an_engines_identity_has_all_that_its_blocks_depend_on(model: Any) -> None:
    """Another block size, dtype, weights or configuration: each shows in its own field."""
    plain = tiny_engine(model).identity
    assert tiny_engine(model).identity == plain
    others = [
        ({"block_size"}, tiny_engine(model, block_size=8)),
        ({"kv_dtype", "weights_fingerprint"}, tiny_engine(tiny_model(dtype=torch.float32))),
        ({"weights_fingerprint"}, tiny_engine(tiny_model(seed=1))),
        ({"architecture", "config_digest"}, tiny_engine(tiny_model("mistral"))),
    ]
    for expected, engine in others:
        differing = {
            field.name
            for field in fields(ModelIdentity)
            if getattr(engine.identity, field.name) != getattr(plain, field.name)
        }
        assert differing == expected


def test_a_block_is_not_matched_in_the_middle_of_another_prompt() -> None:
    """A and B were computed one after the other, C alone: CB finds C only, full and half-filled."""
    world = World(num_blocks=16, block_size=2)
    world.release(world.open_and_compute([1, 1, 0, 0, 0]))
    world.release(world.open_and_compute([2, 2]))
    assert world.open(MODEL, [2, 2, 0, 0, 0, 1]).sequence.num_tokens == 2
    assert world.open(MODEL, [0, 0, 0, 1]).sequence.num_tokens == 0
    assert world.open(MODEL, [1, 1, 0, 0, 0, 1]).sequence.num_tokens == 5
