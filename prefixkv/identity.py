"""What a block of KV depends on besides its tokens.

Two requests may share blocks only if their identities are equal in every field. The encoding is
tagged (field name, type, length, bytes), so that no two different identities encode alike:
`adapter_name="ab", salt="c"` is not `adapter_name="a", salt="bc"`, and None is not "".
"""

from dataclasses import dataclass, field, fields, replace
from functools import cached_property

FieldValue = str | bytes | int | None


@dataclass(frozen=True, kw_only=True)
class ModelIdentity:
    """Everything but the tokens that decides the content of a block.

    The tokenizer is not part of it: blocks are matched by token ids.

    Args:
        architecture: class name of the model.
        config_digest: digest of its configuration, attention and RoPE settings included.
        weights_fingerprint: digest of the weights' content.
        weights_epoch: counts replacements of the weights in place; `PrefixCache` sets it.
        kv_dtype: dtype in which K and V are stored, e.g. "float32".
        kv_scales: quantisation scales of the stored K and V.
        block_size: tokens a block.
        layout: order of the pool's dimensions.
        adapter_name: name of the LoRA adapter.
        adapter_fingerprint: digest of the adapter's weights.
        salt: the tenant's secret; kept out of `repr`.
    """

    architecture: str
    config_digest: bytes = b""
    weights_fingerprint: bytes = b""
    weights_epoch: int = 0
    kv_dtype: str = ""
    kv_scales: bytes = b""
    block_size: int = 0
    layout: str = ""
    adapter_name: str | None = None
    adapter_fingerprint: bytes | None = None
    salt: str | None = field(default=None, repr=False)

    @cached_property
    def canonical(self) -> bytes:
        """The tagged encoding: equal exactly for equal identities."""
        return b"".join(_encode(f.name, getattr(self, f.name)) for f in fields(self))

    def at_epoch(self, weights_epoch: int) -> "ModelIdentity":
        """The same identity with other weights in place."""
        if weights_epoch == self.weights_epoch:
            return self
        return replace(self, weights_epoch=weights_epoch)


def _encode(name: str, value: FieldValue) -> bytes:
    """One field as name, type and value, the first and the last preceded by their length."""
    match value:
        case None:
            kind, data = b"n", b""
        case str():
            kind, data = b"s", value.encode("utf-8", "surrogatepass")
        case bytes():
            kind, data = b"b", value
        case int():
            kind, data = b"i", str(value).encode()
    tag = name.encode()
    return len(tag).to_bytes(2, "big") + tag + kind + len(data).to_bytes(8, "big") + data
