"""The file of API keys: what it may say, and errors that tell where but not what."""

import hashlib
from pathlib import Path

import pytest

from prefixkv.api.access.key_file import collect_keys, read_key_file
from prefixkv.errors import ConfigError

TOML = f"""
[[keys]]
name = "alice"
key = "sk-alice"
salt = "team"
max_requests = 2

[[keys]]
name = "bob@example.org"
sha256 = "{hashlib.sha256(b"sk-bob").hexdigest()}"
salt = "team"
"""


def written(folder: Path, name: str, text: str) -> Path:
    """Return a file with `text`."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_keys_come_with_names_salts_and_limits(tmp_path: Path) -> None:
    """By key or by digest; what an entry does not limit has the limit of all."""
    keys = collect_keys(["sk-line"], written(tmp_path, "keys.toml", TOML), None, 5)
    alice, bob, line = (keys.find(key) for key in (b"sk-alice", b"sk-bob", b"sk-line"))

    assert alice is not None
    assert bob is not None
    assert line is not None
    assert (alice.name, bob.name, line.name) == ("alice", "bob@example.org", "key-1")
    assert (alice.max_requests, bob.max_requests, line.max_requests) == (2, 5, 5)
    assert alice.salt_for(None) == bob.salt_for(None) != line.salt_for(None)
    assert not alice.is_admin


def test_json_and_yaml_say_the_same(tmp_path: Path) -> None:
    """By the suffix."""
    json = written(tmp_path, "keys.json", '{"keys": [{"name": "a", "key": "k"}]}')
    yaml = written(tmp_path, "keys.yml", "keys:\n- name: a\n  key: k\n")

    assert read_key_file(json) == read_key_file(yaml) != []


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("k.toml", 'keys = [{name = "a"}]', "key 'a': exactly one of key and sha256"),
        ("k.toml", '[[keys]]\nkey = "SECRET"', "keys.0.name: Field required"),
        ("k.toml", '[[keys]]\nname = "a b"\nkey = "SECRET"', "keys.0.name: String should match"),
        ("k.toml", '[[keys]]\nname = "a"\nsecret = "SECRET"', "keys.0.secret: Extra inputs"),
        ("k.toml", '[[keys]]\nname = "a"\nkey = "SECRET "', "key 'a': an API key must be"),
        ("k.toml", '[[keys]]\nname = "a"\nsha256 = "SECRET"', "keys.0.sha256: String should"),
        ("k.toml", '[[keys]]\nname = "a"\nkey = "SECRET"\nmax_requests = 0', "max_requests: Input"),
        ("k.toml", '[[keys]]\nname = "a"\nkey = "SECRET"\nsalt = ""', "keys.0.salt: String should"),
        ("k.toml", '[[keys]]\nkey = SECRET"', r"line 2"),
        ("k.json", '{"keys": "SECRET"}', "keys: Input should be a valid list"),
        ("k.json", '["SECRET"]', "it must hold names with values, not a list"),
        ("k.json", '{"keys": SECRET}', "line 1"),
        ("k.yaml", "keys: [SECRET", "not YAML at line 1"),
        ("k.yaml", "a: b: SECRET", "not YAML at line 1"),
        ("k.yaml", "keys: !!python/object:SECRET {}", "not YAML at line 1"),
        ("k.txt", "SECRET", "must end with one of"),
    ],
)
def test_errors_tell_where_and_never_a_secret(
    tmp_path: Path, name: str, text: str, complaint: str
) -> None:
    """The file's name and the entry; not the line, which may hold a key."""
    path = written(tmp_path, name, text)
    with pytest.raises(ConfigError) as refused:
        read_key_file(path)

    assert complaint in str(refused.value)
    assert path.name in str(refused.value)
    assert "SECRET" not in str(refused.value)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    """In the usual words."""
    with pytest.raises(ConfigError, match="No such file or directory"):
        read_key_file(tmp_path / "keys.toml")


def test_a_limit_of_no_key_is_refused() -> None:
    """It would be ignored, and the server open to all."""
    with pytest.raises(ConfigError, match="5 requests per key needs API keys"):
        collect_keys((), None, "root", 5)
