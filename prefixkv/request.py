"""A request: what was asked, and the branches that answer it."""

from array import array

from prefixkv.block import Block
from prefixkv.cache_control import CacheControl, CacheReport, LeaseOutcome, Miss
from prefixkv.hashing import Tokens, pack_tokens
from prefixkv.held_branch import HeldBranch
from prefixkv.identity import ModelIdentity
from prefixkv.logits_rules import LogitsRules
from prefixkv.outputs import PromptLogprob, Usage
from prefixkv.sampling_params import SamplingParams
from prefixkv.sequence import NO_LIMIT, Sequence


class Request:
    """One request from submission to the last token of its last branch.

    It begins with one branch, which computes the prompt; the others are forked from that one when
    the first token is drawn.

    Attributes:
        prompt: its token ids (typecode "i").
        number: order of arrival.
        admission: order of the first admission; None until then.
        seed: of its draws; fixed at submission.
        max_tokens: output tokens of a branch at most; resolved at submission.
        origin: a held branch that its prompt begins with; None if there is none.
        keeps: whether its branches are held when they end.
        held: those that ended, by index, if it `keeps` them.
        cache_control: what it asks of the cache besides being matched.
        miss: why not all of its prompt was found; None until the first admission.
        leases: what became of its breakpoints; None until the first branch has ended well.
        rules: what its parameters ask of logits; the same for all that is generated for it.
        branches: those that wait or run, by index.
        num_blocks_held: distinct blocks that its branches held at the last step that took any.
        prompt_logprobs: those of the first tokens of the prompt, as far as they are known; empty
            unless they were asked for.
        keeps_prompt_logprobs: whether they may be kept with blocks; not if new weights came since.
    """

    def __init__(
        self,
        request_id: str,
        prompt: Tokens,
        params: SamplingParams,
        identity: ModelIdentity,
        *,
        number: int,
        max_tokens: int,
        seed: int = 0,
        priority: int = 0,
        rules: LogitsRules | None = None,
        origin: HeldBranch | None = None,
        keeps: bool = False,
        cache_control: CacheControl | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = array("i", pack_tokens(prompt))
        self.params = params
        self.identity = identity
        self.number = number
        self.max_tokens = max_tokens
        self.seed = seed
        self.priority = priority
        self.rules = rules
        self.origin = origin
        self.keeps = keeps
        self.cache_control = cache_control or CacheControl()
        self.miss: Miss | None = None
        self.leases: tuple[LeaseOutcome, ...] | None = None
        self.held: dict[int, HeldBranch] = {}
        self.admission: int | None = None
        self.usage = Usage(num_prompt_tokens=len(self.prompt))
        self.branches: list[Branch] = []
        self.num_blocks_held = 0
        self.prompt_logprobs: list[PromptLogprob] = []
        self.forget_prompt_logprobs()
        self.restart()

    def __repr__(self) -> str:
        return f"<Request {self.request_id}: {len(self.prompt)} tokens, {len(self.branches)} live>"

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt)

    @property
    def write_limit(self) -> int:
        """Tokens of its sequences that others may find, those of its origin's past included."""
        limit = self.cache_control.write_limit
        inherited = NO_LIMIT if self.origin is None else self.origin.write_limit
        return inherited if limit is None else min(limit, inherited)

    @property
    def is_scoring(self) -> bool:
        """Whether log-probabilities of its prompt are still to be computed."""
        return 0 < len(self.prompt_logprobs) < len(self.prompt)

    @property
    def num_top_prompt_logprobs(self) -> int:
        """Likeliest tokens to tell of at each position of the prompt."""
        return self.params.prompt_logprobs or 0

    def num_scored_for(self, other: "Request") -> int:
        """Tokens at the beginning of its prompt whose log-probabilities will do for `other`."""
        tells_enough = self.num_top_prompt_logprobs >= other.num_top_prompt_logprobs
        return len(self.prompt) if self.keeps_prompt_logprobs and tells_enough else 0

    def forget_prompt_logprobs(self) -> None:
        """Begin anew with the log-probabilities of the prompt; the first token has none."""
        self.keeps_prompt_logprobs = self.params.prompt_logprobs is not None
        self.prompt_logprobs = [None] if self.params.prompt_logprobs is not None else []

    @property
    def cache_report(self) -> CacheReport | None:
        """What the cache did for it so far; None before the first admission."""
        return CacheReport(self.miss, self.leases or ()) if self.miss is not None else None

    @property
    def in_lockstep(self) -> bool:
        """Whether its branches take each step together, or not at all."""
        return self.params.use_beam_search

    def restart(self) -> None:
        """Begin again with one branch that holds nothing."""
        self.branches = [Beam(self, 0) if self.in_lockstep else Branch(self, 0)]
        self.num_blocks_held = 0

    def num_blocks_at_most(self, block_size: int) -> int:
        """Blocks that the request must be able to hold at once, whatever it generates.

        Samples may run one after another; beams run together, each with blocks of its own behind
        the prompt.
        """
        if self.in_lockstep:
            own = -(-(self.max_tokens + block_size) // block_size)
            return len(self.prompt) // block_size + self.params.n * own
        return -(-(len(self.prompt) + self.max_tokens - 1) // block_size)  # the last is not written

    def note_blocks(self, block_size: int) -> None:
        """Count the distinct blocks that its branches hold; O(blocks behind the prompt)."""
        shared = len(self.prompt) // block_size  # the prompt's whole blocks are everybody's
        deepest = 0
        own: set[Block] = set()
        for branch in self.branches:
            if branch.sequence is None:
                continue
            block = branch.sequence.last_block
            deepest = max(deepest, block.depth)
            while block.depth > shared and block not in own:
                own.add(block)
                assert block.parent is not None
                block = block.parent
        self.num_blocks_held = min(shared, deepest) + len(own)
        self.usage.peak_num_blocks = max(self.usage.peak_num_blocks, self.num_blocks_held)


class Branch:
    """One token stream of a request: what the scheduler runs.

    It waits with `sequence` None and runs with one; preemption takes the sequence away again, and
    all its tokens, those it generated included, are then matched anew.

    Attributes:
        index: its number in the request; decides about its draws.
        tokens: ids of the prompt and of the output so far (typecode "i").
        not_before: version of the cache at which it last found no room; None to try at any.
    """

    def __init__(self, request: Request, index: int) -> None:
        self.request = request
        self.index = index
        self.tokens = request.prompt[:]
        self.sequence: Sequence | None = None
        self.not_before: int | None = None

    def __repr__(self) -> str:
        return f"<Branch {self.index} of {self.request.request_id}, {self.num_tokens} tokens>"

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the output so far."""
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - len(self.request.prompt)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens whose KV is neither computed nor scheduled; one while decoding."""
        return self.num_tokens - (self.sequence.num_tokens if self.sequence else 0)

    @property
    def queue_rank(self) -> tuple[int, int, int]:
        """Order of waiting: by priority (lower first), then by arrival."""
        return (self.request.priority, self.request.number, self.index)

    @property
    def running_rank(self) -> tuple[int, int]:
        """Order of running: by the request's first admission."""
        assert self.request.admission is not None
        return (self.request.admission, self.index)

    def token_slice(self, start: int, stop: int) -> "array[int]":
        """Ids of the tokens [start, stop)."""
        return self.tokens[start:stop]

    def append(self, token_id: int) -> None:
        """Add a generated token."""
        self.tokens.append(token_id)

    def fork(self, index: int) -> "Branch":
        """Return another branch of the request with the same tokens, sharing all blocks."""
        assert self.sequence is not None
        child = type(self)(self.request, index)
        child.tokens = self.tokens[:]
        child.sequence = self.sequence.fork()
        self.request.branches.append(child)
        self.request.usage.num_forks += 1
        return child


class Beam(Branch):
    """A branch of a beam search: it knows its length and its last token, and no list of tokens.

    So a beam that goes on twice costs the same whatever its length. `tokens` is the prompt, shared.
    """

    def __init__(self, request: Request, index: int) -> None:
        super().__init__(request, index)
        self.tokens = request.prompt
        self.last_token = -1
        self._num_tokens = len(request.prompt)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the output so far."""
        return self._num_tokens

    def token_slice(self, start: int, stop: int) -> "array[int]":
        """Ids of the tokens [start, stop): within the prompt, or the last one."""
        if stop <= len(self.tokens):
            return self.tokens[start:stop]
        assert (start, stop) == (self._num_tokens - 1, self._num_tokens)
        return array("i", [self.last_token])

    def append(self, token_id: int) -> None:
        """Add a generated token."""
        self.last_token = token_id
        self._num_tokens += 1

    def fork(self, index: int) -> "Beam":
        """Return another beam of the same length and last token, sharing all blocks; O(1)."""
        assert self.sequence is not None
        child = Beam(self.request, index)
        child.last_token, child._num_tokens = self.last_token, self._num_tokens
        child.sequence = self.sequence.fork()
        self.request.usage.num_forks += 1
        return child
