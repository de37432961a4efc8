"""Text and chats to token ids, and back."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from prefixkv.errors import InvalidRequest, ModelError
from prefixkv.token_bytes import TokenBytes

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

Message = Mapping[str, Any]
"""A chat message: `role`, `content` and whatever else the chat template reads."""


class Tokenizer:
    """A tokenizer of transformers, with the checks that requests need."""

    def __init__(self, hf_tokenizer: PreTrainedTokenizerBase) -> None:
        self.hf = hf_tokenizer
        self._token_bytes = TokenBytes(hf_tokenizer)

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Load the tokenizer of a model folder. Raises ModelError when there is none."""
        try:
            return cls(AutoTokenizer.from_pretrained(folder))
        except Exception as error:  # transformers raises many kinds for a broken tokenizer
            raise ModelError(f"{folder}: no usable tokenizer: {error}") from None

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens, those added to the vocabulary included."""
        return len(self.hf)

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text, if the tokenizer names one."""
        eos: int | None = self.hf.eos_token_id
        return eos

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that `decode` leaves out."""
        return frozenset(self.hf.all_special_ids) | {
            token_id for token_id, token in self.hf.added_tokens_decoder.items() if token.special
        }

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text; special tokens spelled out in it become those tokens."""
        ids: list[int] = self.hf.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of the tokens; broken characters become U+FFFD."""
        # cleaning up would change earlier text when later tokens come
        text = self.hf.decode(
            list(token_ids),
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        assert isinstance(text, str)  # a list would mean a batch
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return what a token adds to a text as UTF-8, perhaps a part of a character."""
        return self._token_bytes(token_id)

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Return each token as the vocabulary spells it, a space perhaps as another character."""
        strings = self.hf.convert_ids_to_tokens(list(token_ids))
        assert isinstance(strings, list)  # one string would mean a single id
        return strings

    def describe(self) -> dict[str, Any]:
        """Return what clients ask of a tokenizer, ready for JSON; None where it has none."""
        names = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template")
        told = {name: getattr(self.hf, name, None) for name in names}
        return {
            "tokenizer_class": type(self.hf).__name__,
            "vocab_size": self.vocab_size,
            **{name: None if value is None else str(value) for name, value in told.items()},
        }

    def render_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[int]:
        """Return the tokens of `chat_text`. The BOS token is there only if the template writes it.

        Raises:
            InvalidRequest: as for `chat_text`.
        """
        text = self.chat_text(messages, add_generation_prompt, **template_kwargs)
        return self.encode(text, add_special_tokens=False)

    def chat_text(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """Return a chat as the model's own template lays it out, special tokens spelled out.

        Text parts are joined and null counts as empty, so that the same text gives the same
        tokens however a client wraps it.

        Args:
            messages: at least one.
            add_generation_prompt: end with the opening of the assistant's answer.
            template_kwargs: further variables of the template, for instance `tools`.

        Raises:
            InvalidRequest: the model has no chat template, the template refuses the messages, or
                one of them is not what a template can render; the message names its index.
        """
        if self.hf.chat_template is None:
            raise InvalidRequest(
                "this model has no chat template; send the text as a completion instead", "messages"
            )
        if not messages:
            raise InvalidRequest("messages is empty; a chat has at least one message", "messages")
        plain = [_plain_message(message, index) for index, message in enumerate(messages)]
        if "developer" not in str(self.hf.chat_template):
            plain = [_without_developer(message) for message in plain]
        try:
            text = self.hf.apply_chat_template(
                plain,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **template_kwargs,
            )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise InvalidRequest(f"the model's chat template: {error}", "messages") from None
        assert isinstance(text, str)  # a list would mean a batch
        return text


def _plain_message(message: Message, index: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(
            f"messages[{index}] is {message!r:.100}; it must be an object", "messages"
        )
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequest(
            f"messages[{index}].role is {role!r:.100}; it must be one of {', '.join(ROLES)}",
            "messages",
        )
    return {**message, "content": _plain_content(message.get("content"), f"messages[{index}]")}


def _plain_content(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidRequest(
            f"{where}.content is of type {type(content).__name__}; it must be a string, null or a "
            "list of parts",
            "messages",
        )
    return "".join(
        _part_text(part, f"{where}.content[{index}]") for index, part in enumerate(content)
    )


def _part_text(part: object, where: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise InvalidRequest(
            f"{where} is of type {kind!r:.100}; this model takes text parts only", "messages"
        )
    text = part.get("text")
    if not isinstance(text, str):
        kind = type(text).__name__
        raise InvalidRequest(f"{where}.text is of type {kind}; it must be a string", "messages")
    return text


def _without_developer(message: dict[str, Any]) -> dict[str, Any]:
    """Templates older than the role know the same thing as the system message."""
    return {**message, "role": "system"} if message["role"] == "developer" else message
