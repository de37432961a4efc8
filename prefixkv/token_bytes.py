"""What each token adds to a text, as bytes: exact even where a token is a part of a character.

Decoding one token alone would show such a part as U+FFFD and lose the space that some tokenizers
strip from the start of a text, so the tokenizer's own alphabet is read instead.
"""

import json
import re
from typing import Any

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
_METASPACE = "\u2581"


class TokenBytes:
    """Maps token ids to bytes; each is looked up once.

    Args:
        hf_tokenizer: a tokenizer of transformers.
    """

    def __init__(self, hf_tokenizer: Any) -> None:
        self._hf = hf_tokenizer
        self._added = hf_tokenizer.added_tokens_decoder
        decoder = _decoder(hf_tokenizer)
        self._is_byte_level = '"ByteLevel"' in decoder
        self._has_metaspace = '"Metaspace"' in decoder or _METASPACE in decoder
        self._known: dict[int, bytes] = {}

    def __call__(self, token_id: int) -> bytes:
        """Return the bytes of a token, b"" for an id that has none."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._look_up(token_id)
        return known

    def _look_up(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return str(added.content).encode()
        token = self._hf.convert_ids_to_tokens(token_id)
        if token is None:  # models may have more rows than the tokenizer has tokens
            return b""
        if self._is_byte_level:
            return b"".join(_BYTES.get(char, char.encode()) for char in token)
        if found := _BYTE_FALLBACK.fullmatch(token):
            return bytes([int(found[1], 16)])
        if self._has_metaspace:
            return str(token).replace(_METASPACE, " ").encode()
        return str(self._hf.decode([token_id], clean_up_tokenization_spaces=False)).encode()


def _decoder(hf_tokenizer: Any) -> str:
    """Return the description of the decoder as JSON, "" for tokenizers that have none."""
    backend = getattr(hf_tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    # parsed and written again, so that no character in it is escaped
    return json.dumps(json.loads(decoder.__getstate__()), ensure_ascii=False) if decoder else ""


def _byte_level_alphabet() -> dict[str, bytes]:
    """Return GPT-2's alphabet: printable Latin-1 stands for itself, other bytes for U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    pairs = [(byte, byte) for byte in printable]
    pairs += [(0x100 + i, byte) for i, byte in enumerate(others)]
    return {chr(code): bytes([byte]) for code, byte in pairs}


_BYTES = _byte_level_alphabet()
