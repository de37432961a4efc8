"""Where the breakpoints of a chat lie in its prompt, for real tokenizers and odd templates."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import transformers as hf
from tiny_models import CHAT_TEMPLATE, byte_tokenizer
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from prefixkv.api.caching.breakpoints import MAX_MARKS, Mark, breakpoint_positions, take_marks
from prefixkv.errors import InvalidRequest
from prefixkv.tokenizer import Tokenizer

MARK = {"prompt_cache_breakpoint": {"mode": "explicit"}}
TEMPLATES = {
    "plain": CHAT_TEMPLATE,
    "trims": "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}\n\n{% endfor %}",
    "system last": "{% for m in messages[1:] %}[{{ m.content }}]{% endfor %}"
    "{{ messages[0].content }}",
}


def part(text: str, **more: Any) -> dict[str, Any]:
    """A text part of a message."""
    return {"type": "text", "text": text, **more}


def merging_tokenizer() -> hf.PreTrainedTokenizerFast:
    """A tokenizer with long tokens, some of which straddle any border in the text."""
    bpe = HfTokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(["the cat sat on the mat. the end é ü"] * 9, trainer)
    build: Callable[..., hf.PreTrainedTokenizerFast] = hf.PreTrainedTokenizerFast
    return build(tokenizer_object=bpe, additional_special_tokens=["<|im_start|>", "<|im_end|>"])


def sentencepiece_tokenizer() -> hf.PreTrainedTokenizerFast:
    """A tokenizer that puts a space before a text, which no decoded text has."""
    alphabet = sorted({"▁", *"abcdefghijklmnopqrstuvwxyz<>[]\n.|_é"})
    tokens = ["<unk>", *alphabet, "ca", "cat", "▁cat", "on", "▁on"]
    merges = [("c", "a"), ("ca", "t"), ("▁", "cat"), ("o", "n"), ("▁", "on")]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    bpe = HfTokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace()
    bpe.decoder = decoders.Metaspace()
    build: Callable[..., hf.PreTrainedTokenizerFast] = hf.PreTrainedTokenizerFast
    return build(tokenizer_object=bpe, unk_token="<unk>")


def placed(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], change: Callable[[list[int]], list[int]]
) -> tuple[list[int | None], list[int]]:
    """Return where the marks of `messages` lie in its changed prompt, and that."""
    marks = take_marks(messages)
    prompt = change(tokenizer.render_chat(messages))
    return breakpoint_positions(marks, messages, tokenizer.chat_text, prompt, tokenizer), prompt


def same(prompt: list[int]) -> list[int]:
    """Return the prompt."""
    return prompt


def chat() -> list[dict[str, Any]]:
    """A chat with five marked places, at 0, 1, 1 again, 2 and 3."""
    return [
        {"role": "system", "content": [part("the cat é", **MARK), part(" sat")]},
        {"role": "user", "content": [part("on the\n\n", **MARK), part("mat"), part(". ", **MARK)]},
        {"role": "assistant", "content": "the end", "cache_control": {"type": "ephemeral"}},
        {"role": "user", "content": [part("ü "), part("cat", **MARK, cache_control=None)]},
    ]


EXPECTED = {
    "plain": ["the cat é", "the\n\n", "mat. ", "the end", "ü cat"],
    "trims": ["the cat é", "the\n\n", "mat.", "the end", "ü cat"],
    "system last": ["][ü cat]the cat é", "[on the\n\n", "mat. ", "the end", "[ü cat"],
}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("make", [byte_tokenizer, merging_tokenizer])
def test_a_breakpoint_is_the_exact_end_of_what_it_marks(
    make: Callable[[], hf.PreTrainedTokenizerFast], template: str
) -> None:
    """The tokens before it spell the text before it, less than one token short of it."""
    hf_tokenizer = make()
    hf_tokenizer.chat_template = TEMPLATES[template]
    tokenizer = Tokenizer(hf_tokenizer)
    positions, prompt = placed(tokenizer, chat(), same)
    text = tokenizer.chat_text(chat())

    for position, ending in zip(positions, EXPECTED[template], strict=True):
        assert position is not None
        end = text.encode().index(ending.encode()) + len(ending.encode())
        ends = [len(b"".join(map(tokenizer.token_bytes, prompt[:k]))) for k in range(len(prompt))]
        assert ends[position] <= end < ends[position + 1]
        assert make is merging_tokenizer or ends[position] == end


def test_the_long_tokens_do_straddle() -> None:
    """Else the test above would show nothing of rounding."""
    hf_tokenizer = merging_tokenizer()
    hf_tokenizer.chat_template = TEMPLATES["plain"]
    tokenizer = Tokenizer(hf_tokenizer)
    messages = [{"role": "user", "content": [part("the c", **MARK), part("at sat")]}]
    (position,), prompt = placed(tokenizer, messages, same)

    before = b"".join(map(tokenizer.token_bytes, prompt[:position]))
    assert b"user\nthe c".startswith(before.removeprefix(b"<|im_start|>"))
    assert not before.endswith(b"the c")


def test_a_text_that_the_tokens_do_not_spell_is_measured_from_its_end() -> None:
    """SentencePiece has a space more at the start; what is remembered may be spelled otherwise."""
    hf_tokenizer = sentencepiece_tokenizer()
    hf_tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = Tokenizer(hf_tokenizer)
    messages = [{"role": "user", "content": [part("cat on", **MARK), part(" cat")]}]
    (position,), prompt = placed(tokenizer, messages, same)
    assert tokenizer.decode(prompt[:position]) == "cat on"

    tokenizer = Tokenizer(byte_tokenizer())
    other = tokenizer.encode('{"a":1}')

    def respelled(prompt: list[int]) -> list[int]:
        start = len(tokenizer.encode("<|im_start|>assistant\n"))
        return prompt[:start] + other + prompt[start + len('{"a": 1}') :]

    messages = [
        {"role": "assistant", "content": '{"a": 1}'},
        {"role": "user", "content": [part("cat", **MARK), part(" sat")]},
    ]
    (position,), prompt = placed(tokenizer, messages, respelled)
    assert tokenizer.decode(prompt[:position], skip_special_tokens=False).endswith("user\ncat")


def test_between_two_texts_that_are_spelled_otherwise_it_falls_back() -> None:
    """To the end of what is certain, which is a shorter prefix of the same prompt."""
    tokenizer = Tokenizer(byte_tokenizer())
    messages = [{"role": "user", "content": [part("abc"), part("def", **MARK), part("ghi")]}]

    def scrambled(prompt: list[int]) -> list[int]:
        text = tokenizer.decode(prompt, skip_special_tokens=False)
        return tokenizer.encode(text.replace("bc", "BC").replace("hi", "HI"))

    (position,), prompt = placed(tokenizer, messages, scrambled)
    assert tokenizer.decode(prompt[:position], skip_special_tokens=False).endswith("user\na")


ODD: list[str] = [
    "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
    "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ m.content | length }}{% endfor %}",
    "{% for m in messages %}{{ m.role }}{% endfor %}",
    "{% for m in messages %}{{ raise_exception('no') if m.content | length > 9 }}.{% endfor %}",
]


@pytest.mark.parametrize("template", ODD)
def test_a_template_that_rewrites_the_text_leaves_no_place(template: str) -> None:
    """Nor is that an error."""
    hf_tokenizer = byte_tokenizer()
    hf_tokenizer.chat_template = template
    positions, _ = placed(
        Tokenizer(hf_tokenizer), [{"role": "user", "content": [part("cat", **MARK)]}], same
    )

    assert positions == [None]


def test_marks_leave_no_trace() -> None:
    """What is left is what an unmarked chat is."""
    messages = chat()
    assert take_marks(messages) == [
        Mark(0, 0, None), Mark(1, 0, None), Mark(1, 2, None), Mark(2, None, None), Mark(3, 1, None),
    ]  # fmt: skip

    assert "cache" not in str(messages)
    assert take_marks(messages) == []


@pytest.mark.parametrize("messages", [None, "x", [], [None, 1, {"content": 5}, {"content": [7]}]])
def test_what_is_no_chat_has_no_marks(messages: Any) -> None:
    """It is refused elsewhere."""
    assert take_marks(messages) == []


def test_of_very_many_marks_the_last_are_looked_at() -> None:
    """And one under two names is one."""
    both = {**MARK, "cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "new"}}
    messages = [{"role": "user", "content": [part("x", **both) for _ in range(MAX_MARKS + 20)]}]
    marks = take_marks(messages)

    assert [mark.part for mark in marks] == list(range(20, MAX_MARKS + 20))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"prompt_cache_breakpoint": True}, "prompt_cache_breakpoint"),
    ({"prompt_cache_breakpoint": {"mode": "implicit"}}, "prompt_cache_breakpoint.mode"),
    ({"cache_control": {"type": "ephemeral", "ttl": True}}, "cache_control.ttl"),
    ({"cache_control": {"type": 5}}, "cache_control.type"),
]


@pytest.mark.parametrize(("mark", "param"), WRONG)
def test_a_wrong_mark_is_named(mark: dict[str, Any], param: str) -> None:
    """By its place in the chat."""
    with pytest.raises(InvalidRequest) as on_part:
        take_marks([{"role": "user", "content": [part("a"), part("b", **mark)]}])
    assert on_part.value.param == f"messages.0.content.1.{param}"

    with pytest.raises(InvalidRequest) as on_message:
        take_marks([{"role": "user", "content": "a", **mark}])
    assert on_message.value.param == f"messages.0.{param}"


def test_text_is_not_taken_for_a_sentinel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that could guess one would only lose its own breakpoint."""
    monkeypatch.setattr("secrets.token_hex", lambda _: "guessed")
    messages = [{"role": "user", "content": [part("guessed00 x", **MARK), part("y")]}]
    positions, _ = placed(Tokenizer(byte_tokenizer()), messages, same)

    assert positions == [None]


def test_no_marks_cost_no_rendering() -> None:
    """Most chats have none."""

    def render(messages: Sequence[Any]) -> str:
        raise AssertionError(messages)

    assert breakpoint_positions([], [{}], render, [1], Tokenizer(byte_tokenizer())) == []
