"""The token memory with a tokenizer that cuts words otherwise than a model may write them."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from prefixkv.api.history.chat_digest import chat_digests
from prefixkv.api.history.token_memory import ChatTokens, TokenMemory
from prefixkv.api.history.told_tokens import ToldTokens, told_tokens
from prefixkv.api.requests.messages import RenderedChat, normalized
from prefixkv.outputs import BranchOutput
from prefixkv.tokenizer import Tokenizer
from tests.api.fake_engine import FakeEngine

END = "<end>"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ CONTENT }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<end>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
USER = {"role": "user", "content": "ab"}


def make_tokenizer(content: str = "m.content", *, prepends: bool = False) -> Tokenizer:
    """Return a tokenizer of bytes and of pairs of small letters; `content` goes into its template.

    With `prepends` it is one that puts a space before every text, and takes it away again.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = "abcdefgh"
    merges = [(a, b) for a in letters for b in letters]
    merges.append(("©", "x"))  # the second byte of é, and a letter
    tokens = [END, *alphabet, *(a + b for a, b in merges)]
    model = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    if prepends:
        backend.normalizer = normalizers.Prepend(" ")
        backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    build: Any = PreTrainedTokenizerFast  # untyped
    wrapped = build(tokenizer_object=backend, eos_token=END)
    wrapped.chat_template = TEMPLATE.replace("CONTENT", content)
    return Tokenizer(wrapped)


TOKENIZER = make_tokenizer()


def spelled(text: str, tokenizer: Tokenizer = TOKENIZER) -> list[int]:
    """Return one token a character: what the tokenizer itself would never make of letters."""
    return [i for char in text for i in tokenizer.encode(char, add_special_tokens=False)]


def chat(
    *messages: Mapping[str, Any], tokenizer: Tokenizer = TOKENIZER, **kwargs: Any
) -> RenderedChat:
    """Return a chat as its template has it."""
    plain = normalized(messages)
    return RenderedChat(plain, tokenizer.chat_text(plain, **kwargs), kwargs)


class Talk:
    """A client that repeats what it was told, and the memory behind it."""

    def __init__(self, memory: TokenMemory, tokenizer: Tokenizer = TOKENIZER) -> None:
        self.memory = memory
        self.tokenizer = tokenizer

    def tokens(self, *messages: Mapping[str, Any], salt: str | None = None) -> ChatTokens:
        """Return the prompt of a chat."""
        rendered = chat(*messages, tokenizer=self.tokenizer)
        tokens = self.memory.tokens(rendered, salt, self.tokenizer)
        assert tokens.transcript.all_token_ids() == tokens.token_ids
        return tokens

    def told(self, prompt: ChatTokens, text: str) -> list[int]:
        """Answer, one character a token; return prompt and answer."""
        ids = spelled(text, self.tokenizer)
        self.memory.remember(prompt, text, ToldTokens(ids, text))
        return prompt.token_ids + ids


def assistant(content: Any, **fields: Any) -> dict[str, Any]:
    """Return a message as a client repeats it."""
    return {"role": "assistant", "content": content, **fields}


@pytest.mark.parametrize(
    "message",
    [
        assistant("abcd"),
        assistant([{"type": "text", "text": "abcd"}]),
        assistant([{"text": "ab", "type": "text"}, {"type": "text", "text": "cd"}]),
        {"tool_calls": None, "content": "abcd", "refusal": None, "role": "assistant"},
        assistant("abcd", tool_calls=[], annotations=[], function_call=None),
    ],
)
def test_an_answer_comes_back_as_the_tokens_it_was(message: dict[str, Any]) -> None:
    """However the client spells it; encoded anew, it would be other tokens."""
    talk = Talk(TokenMemory())
    first = talk.told(talk.tokens(USER), "abcd")
    second = talk.tokens(USER, message, {"role": "user", "content": "x"})
    anew = TOKENIZER.render_chat([USER, assistant("abcd"), {"role": "user", "content": "x"}])

    assert second.token_ids[: len(first)] == first
    assert anew[: len(first)] != first
    assert TOKENIZER.decode(second.token_ids, skip_special_tokens=False) == TOKENIZER.decode(
        anew, skip_special_tokens=False
    )
    assert talk.memory.stats.num_hits == 1
    assert talk.memory.stats.num_spliced_tokens == len(first)


def test_five_turns_keep_all_that_was_generated() -> None:
    """Each turn begins with exactly the tokens of the one before, and costs its own text only."""
    talk = Talk(TokenMemory())
    messages: list[Mapping[str, Any]] = [USER]
    before: list[int] = []
    sizes = [0]
    for turn in range(5):
        prompt = talk.tokens(*messages)
        assert prompt.token_ids[: len(before)] == before
        before = talk.told(prompt, "abcdefgh" * 20)
        sizes.append(talk.memory.num_bytes)
        messages += [assistant("abcdefgh" * 20), {"role": "user", "content": f"cd{turn}"}]
    grown = [b - a for a, b in pairwise(sizes)]

    assert max(grown) < 1.1 * min(grown)
    assert talk.memory.stats.num_misses == {}


def test_tool_arguments_are_the_same_however_spaced() -> None:
    """A call in the history is known again though keys and spaces come otherwise."""
    talk = Talk(TokenMemory())
    spellings = ['{"a": 1, "b": [2]}', '{"b":[2],"a":1}']
    chats = []
    for arguments in spellings:
        function = {"name": "f", "arguments": arguments}
        call: dict[str, Any] = {"id": arguments, "type": "function", "function": function}
        history = [USER, assistant(None, tool_calls=[call]), {"role": "tool", "content": "x"}]
        chats.append(chat(*history))
    digests = [chat_digests("s", {}, c.messages) for c in chats]

    assert digests[0] == digests[1]
    # the template here prints arguments as they come, so their text decides
    first = talk.memory.tokens(chats[0], None, TOKENIZER)
    talk.told(first, "ab")
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a":1,   "b":[2]}'}}
    history = [USER, assistant(None, tool_calls=[call]), {"role": "tool", "content": "x"}]
    again = talk.tokens(*history, assistant("ab"))
    assert again.token_ids[: len(first.token_ids) + 2] == first.token_ids + spelled("ab")


@pytest.mark.parametrize(
    "content",
    ["m.content | trim", "m.content.split('|')[-1]", "m.content if loop.last else 'gone'"],
)
def test_a_template_that_rewrites_history_has_the_last_word(content: str) -> None:
    """Where it changes an answer, its own tokens count."""
    tokenizer = make_tokenizer(content)
    talk = Talk(TokenMemory(), tokenizer)
    talk.told(talk.tokens(USER), " thought|abcd ")
    history = [USER, assistant(" thought|abcd "), {"role": "user", "content": "x"}]

    assert talk.tokens(*history).token_ids == tokenizer.render_chat(history)
    assert talk.memory.stats.num_misses == {"rewritten": 1}


def test_an_earlier_answer_counts_where_a_later_one_was_changed() -> None:
    """By the client: what it says now is encoded behind what is still as it was."""
    talk = Talk(TokenMemory())
    first = talk.told(talk.tokens(USER), "abcd")
    history = [USER, assistant("abcd"), USER]
    talk.told(talk.tokens(*history), "efgh")
    changed = talk.tokens(*history, assistant("other"), USER)

    assert changed.token_ids[: len(first)] == first
    assert talk.memory.stats.num_hits == 2


def test_another_salt_knows_nothing() -> None:
    """Nor do chats under other options of the template."""
    talk = Talk(TokenMemory())
    talk.told(talk.tokens(USER, salt="a"), "abcd")
    history = [USER, assistant("abcd"), USER]

    for salt in (None, "b", ""):
        assert talk.tokens(*history, salt=salt).token_ids == TOKENIZER.render_chat(history)
    other = talk.memory.tokens(chat(*history, thinking=True), "a", TOKENIZER)
    assert other.token_ids == TOKENIZER.render_chat(history)
    assert talk.memory.stats.num_misses == {"unknown": 4}
    assert talk.tokens(*history, salt="a").token_ids != TOKENIZER.render_chat(history)


def test_a_text_that_changes_when_it_stands_alone_is_not_put_behind_another() -> None:
    """A tokenizer that begins every text with a space would put one into the middle."""
    tokenizer = make_tokenizer(prepends=True)
    talk = Talk(TokenMemory(), tokenizer)
    prompt = talk.tokens(USER)
    talk.memory.remember(prompt, "abcd", ToldTokens([1], "abcd"))
    history = [USER, assistant("abcd"), USER]

    assert talk.tokens(*history).token_ids == tokenizer.render_chat(history)
    assert talk.memory.stats.num_misses == {"seam": 1}


def test_memory_is_bounded_and_can_be_off() -> None:
    """By bytes, what was used last stays; with none nothing is kept, and nothing is counted."""
    talk = Talk(TokenMemory(6000))
    for i in range(20):
        talk.told(talk.tokens({"role": "user", "content": f"{i}"}), "ab" * 100)
        assert talk.memory.num_bytes <= 6000
    kept = []
    for i in range(20):
        num_hits = talk.memory.stats.num_hits
        talk.tokens({"role": "user", "content": f"{i}"}, assistant("ab" * 100))
        kept += [i] * (talk.memory.stats.num_hits - num_hits)
    assert kept == list(range(20 - talk.memory.num_entries, 20))
    assert talk.memory.num_evicted == 20 - len(kept) > 0

    off = Talk(TokenMemory(0))
    off.told(off.tokens(USER), "abcd")
    history = [USER, assistant("abcd")]
    assert off.tokens(*history).token_ids == TOKENIZER.render_chat(history)
    assert (off.memory.num_entries, off.memory.num_bytes) == (0, 0)
    assert (off.memory.stats.num_hits, off.memory.stats.num_misses) == (0, {})


@pytest.mark.parametrize(
    ("ids", "fields", "expected"),
    [
        ("abc", {"finish_reason": "length"}, ("abc", "abc", "")),
        ("abc.", {"finish_reason": "stop", "text": "abc"}, ("abc", "abc", "")),
        # a stop string "xy" that begins and ends at tokens, and one that does not
        ("abxy", {"text": "ab", "stop_reason": "xy"}, ("ab", "ab", "")),
        (["ab", "cd", "e"], {"text": "abc", "stop_reason": "de"}, (["ab"], "ab", "c")),
        (["ab"], {"text": "", "stop_reason": "a"}, ([], "", "")),
        # half a character before the stop string counts only with its other half
        ([b"\xc3", b"\xa9", "x"], {"text": "é", "stop_reason": "x"}, ([b"\xc3", b"\xa9"], "é", "")),
        ([b"\xc3", b"\xa9x"], {"text": "é", "stop_reason": "x"}, ([], "", "é")),
        ([b"\xc3", "x"], {"text": "\ufffd", "stop_reason": "x"}, ([], "", "\ufffd")),
        # told with what stopped it: all of a string, none of an end token
        ("abxy", {"text": "abxy", "stop_reason": "xy", "included": True}, ("abxy", "abxy", "")),
        ("abc.", {"text": "abc", "included": True}, ("abc", "abc", "")),
        ("abx", {"text": "abx", "stop_reason": 1, "included": True}, ("abx", "abx", "")),
        # a special token in the middle is in no text, and ends what is kept
        ("ab.c", {"finish_reason": "length", "text": "abc"}, ("ab", "ab", "c")),
        ("ab.c.", {"text": "abc"}, ("ab", "ab", "c")),
        (".ab", {"finish_reason": "length", "text": "ab"}, ("", "", "ab")),
        ("a.bx", {"text": "ab", "stop_reason": "x"}, ("a", "a", "b")),
        ("ab", {"finish_reason": "abort"}, None),
    ],
)
def test_only_tokens_whose_text_was_told_are_kept(
    ids: Sequence[str | bytes], fields: dict[str, Any], expected: Any
) -> None:
    """What ended an answer is not in it; `.` stands for the end token."""
    included = fields.pop("included", False)
    text = fields.pop("text", "".join(map(str, ids)))
    output = BranchOutput(0, text, _ids(ids), **{"finish_reason": "stop", **fields})
    told = told_tokens(output, TOKENIZER, stop_included=included)

    assert told == (expected and ToldTokens(_ids(expected[0]), *expected[1:]))


def _ids(tokens: Sequence[str | bytes]) -> list[int]:
    by_bytes = {TOKENIZER.token_bytes(i): i for i in range(TOKENIZER.vocab_size)}
    spelled = [END if token == "." else token for token in tokens]
    return [by_bytes[t if isinstance(t, bytes) else t.encode()] for t in spelled]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_chats_use_it(client: httpx.Client, engine: FakeEngine, is_streamed: bool) -> None:
    """Each of several answers is remembered, and the next turn of each has its exact tokens."""
    # the fake's ids of these are their code points, which its tokenizer would not make of them
    engine.script = "éè"
    question = [{"role": "user", "content": f"{is_streamed}"}]
    body = {"messages": question, "n": 2, "max_tokens": 2, "stream": is_streamed}
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    for text in ("éè", "èé"):
        history = [*question, assistant(text), {"role": "user", "content": "on"}]
        client.post("/v1/chat/completions", json={"messages": history})
        prompt = engine.calls[-1]["prompt"]
        first = engine.calls[0]["prompt"]
        assert prompt[: len(first) + 2] == first + [ord(char) for char in text]
        assert bytes(prompt[len(first) + 2 :]) == b"\n<user>on\n<assistant>"
