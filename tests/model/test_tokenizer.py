"""Texts and chats become tokens the same way however a client wraps them."""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from prefixkv.errors import InvalidRequest
from prefixkv.tokenizer import Tokenizer

TEMPLATE = (
    "<s>{% for m in messages %}{{ m['role'] + ':' + m['content'] + '\n' }}{% endfor %}"
    "{% if tools %}{{ raise_exception('no tools here') }}{% endif %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def byte_tokenizer(template: str | None) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0} | {char: i + 1 for i, char in enumerate(alphabet)}
    rust = RustTokenizer(models.BPE(vocab, []))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    hf = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=rust, bos_token="<s>"
    )
    hf.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    hf.chat_template = template
    return Tokenizer(hf)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_tokenizer(TEMPLATE)


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def test_text_comes_back(tokenizer: Tokenizer) -> None:
    text = "  two  blanks , 日本 🙂\n"

    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text)[0] == 0
    assert tokenizer.encode(text, add_special_tokens=False) == tokenizer.encode(text)[1:]


def test_the_bos_token_of_a_template_is_not_doubled(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.render_chat(user("hi"))

    assert token_ids.count(0) == 1
    assert tokenizer.decode(token_ids) == "user:hi\nassistant:"


def test_a_string_and_its_parts_render_alike(tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b", "cache_control": {}}]

    assert tokenizer.render_chat(user(parts)) == tokenizer.render_chat(user("a b"))
    assert tokenizer.render_chat(user(None)) == tokenizer.render_chat(user(""))
    assert tokenizer.render_chat([{"role": "user"}]) == tokenizer.render_chat(user([]))


def test_the_generation_prompt_can_be_left_out(tokenizer: Tokenizer) -> None:
    text = tokenizer.decode(tokenizer.render_chat(user("hi"), add_generation_prompt=False))

    assert text == "user:hi\n"


def test_developer_is_system_to_a_template_that_does_not_know_it(tokenizer: Tokenizer) -> None:
    developer = tokenizer.render_chat([{"role": "developer", "content": "x"}])

    assert developer == tokenizer.render_chat([{"role": "system", "content": "x"}])


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "at least one message"),
        (["hi"], r"messages\[0\] is 'hi'"),
        ([*user("ok"), {"role": "robot", "content": ""}], r"messages\[1\]\.role is 'robot'"),
        (user(7), r"messages\[0\]\.content is of type int"),
        (user([{"type": "image_url"}]), r"messages\[0\]\.content\[0\] is of type 'image_url'"),
        (
            user([{"type": "text", "text": "a"}, {"type": "text"}]),
            r"content\[1\]\.text is of type NoneType",
        ),
        (user(["a"]), r"content\[0\] is of type 'str'"),
    ],
)
def test_a_wrong_message_is_named(tokenizer: Tokenizer, messages: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        tokenizer.render_chat(messages)

    assert caught.value.param == "messages"


def test_what_a_template_refuses_is_an_invalid_request(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="no tools here"):
        tokenizer.render_chat(user("hi"), tools=[{"type": "function"}])


def test_a_model_without_a_template_takes_no_chats() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        byte_tokenizer(None).render_chat(user("hi"))


def test_facts(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 257
    assert tokenizer.eos_token_id is None
    assert tokenizer.special_token_ids == {0}


def test_special_tokens_are_shown_on_demand(tokenizer: Tokenizer) -> None:
    """As the vocabulary spells them, and in a text."""
    ids = tokenizer.encode("a b")

    assert tokenizer.token_strings(ids) == ["<s>", "a", "Ġ", "b"]
    assert tokenizer.decode(ids) == "a b"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>a b"


def test_it_describes_itself_for_json(tokenizer: Tokenizer) -> None:
    """Nothing but strings, numbers and null."""
    told = tokenizer.describe()

    assert json.loads(json.dumps(told)) == told
    assert (told["bos_token"], told["eos_token"], told["pad_token"]) == ("<s>", None, None)
    assert told["chat_template"] == TEMPLATE
    assert told["vocab_size"] == 257
