"""The loop of speculative generation: draft, verify all sequences in one forward, accept and rewind each."""

from time import perf_counter

import torch
from torch.nn.functional import pad

from hf_efficient.generation.arriving import ArrivingTokens, generator_of
from hf_efficient.generation.output import Statistics
from hf_efficient.generation.ragged_model import RaggedModel
from hf_efficient.generation.request import GenerationRequest
from hf_efficient.generation.sequences import Sequences
from hf_efficient.generation.speculation.draft_length import DraftLengthPolicy
from hf_efficient.generation.speculation.proposal import MAX_NODES, Proposal
from hf_efficient.generation.speculation.token_tree import ancestors, depths_of
from hf_efficient.generation.speculation.verification import verify


# Tokens that the others may still get for finished sequences to leave a batch whose smaller forwards are not captured
# yet: capturing takes 10 to 15 steps, and a step of half the sequences two thirds of the time or more.
MIN_TOKENS_TO_CAPTURE = 64


class SpeculativeLoop:
    """From the logits after the prompts to the finished sequences.

    Args:
        request: its drafter may be None, which decodes token by token.
        sequences: holds the prompts, no token generated yet.
        target: its cache holds the prompts.
        draft_length: chooses how many tokens are drafted; None: always as many as the drafter may.
        keep_finished: finished sequences stay in the target's cache, at their final length. Else they leave the batch:
            at once, or where forwards are captured once at least half of the sequences are finished.
    """

    def __init__(
        self,
        request: GenerationRequest,
        sequences: Sequences,
        target: RaggedModel,
        draft_length: DraftLengthPolicy | None,
        keep_finished: bool,
    ):
        self.sequences, self.target, self.drafter = sequences, target, request.drafter
        self.draft_length, self.keep_finished, self.streamer = draft_length, keep_finished, request.streamer
        self.do_sample = request.generation_config.do_sample
        self.acceptance = None if request.speculation is None else request.speculation.acceptance
        # greedy, without processors: the argmax is all that is read of the logits
        self.takes_argmax = not sequences.needs_scores and not self.do_sample and self.acceptance is None
        target.wants_logits = not self.takes_argmax or (self.drafter is not None and self.drafter.reads_logits)
        self.statistics = Statistics(sequences.batch_size)
        self.seconds = dict.fromkeys(("draft", "verify", "host"), 0.0)
        self._since = perf_counter()
        self._drafter_has_begun = False
        self._growing = sequences.batch_size  # sequences that have not ended
        self._settled = [0] * sequences.batch_size  # generated tokens in the target's cache when the last step ended
        self._streamed = 0  # generated tokens of each sequence that the streamer has

    def run(self, logits: torch.Tensor) -> None:
        """logits: float [rows, vocabulary], after the prompts. The caller's cache holds no draft afterwards, even where
        code of the caller's raises."""
        try:
            self._run(logits)
        except BaseException:
            if self.keep_finished:
                self.target.rewind(self._settled)
            raise

    def _run(self, logits: torch.Tensor) -> None:
        sequences, drafter, target, policy = self.sequences, self.drafter, self.target, self.draft_length
        prompt_hidden = target.hidden
        if self._step(logits[:, None].to(sequences.device), None):
            if drafter is not None and drafter.reads_hidden:
                if policy is None or not policy.skips_call(max(sequences.limits)):
                    self._begin(prompt_hidden[self._going])
            self._spend("draft")
            self.seconds = dict.fromkeys(self.seconds, 0.0)  # the first token belongs to the prompt's forward
            self._run_ahead() if self._runs_ahead else self._run_steps()
        if policy is not None:
            policy.finish(max(sequences.generated))
        for name, seconds in self.seconds.items():
            setattr(self.statistics, f"{name}_seconds", seconds)

    @property
    def _runs_ahead(self) -> bool:
        """Whether forwards are queued before the host has read the tokens that they follow."""
        sequences = self.sequences
        keeps_up = sequences.processors_read_ids or sequences.collects or sequences.pads_finished
        return self.drafter is None and self.target.runs_ahead and not keeps_up

    def _run_steps(self) -> None:
        goes_on = True
        while goes_on:
            proposal = self._propose()
            goes_on = self._step(self._forward(proposal), proposal)

    def _run_ahead(self) -> None:
        """Decodes token by token. The device computes a forward while the host reads the tokens of the one before it,
        so that sequences end one forward late: the last one's results are dropped, and its random numbers taken
        back."""
        sequences, generator = self.sequences, generator_of(self.target.model.device)
        arriving = self._queue(sequences.last(1), 0)
        while True:
            random_numbers, following = generator.get_state() if self.do_sample else None, None
            if any(sequences.limits):
                following = self._queue(arriving.tokens, 1)
            new, accepted, drafted = sequences.extend(arriving.tokens, None, None, read=arriving.read())
            self.statistics.steps += 1
            self._learn(None, new, accepted, drafted, drafted, self._spend("verify"))
            self._stream()
            if not self._select(following):
                if self.do_sample and following is not None:
                    generator.set_state(random_numbers)
                return
            arriving = following

    def _queue(self, fed: torch.Tensor, unread: int) -> ArrivingTokens:
        """Queues the forward of `fed` int64 [rows, 1] and the choice of the tokens that follow. unread: how many of the
        tokens generated so far the host has yet to read, 0 or 1."""
        target = self.target
        logits = target(fed, [total - 1 + unread for total in self._generated()])
        scores = logits if self.takes_argmax else self.sequences.process(logits)
        choice = target.argmax if self.takes_argmax else None
        return ArrivingTokens(verify(scores, None, self.do_sample, choice=choice).tokens)

    def _stream(self) -> None:
        """Gives the streamer each column of new tokens [batch] that all sequences have reached, as plain generation
        does: with padding where one has ended."""
        if self.streamer is None:
            return
        sequences, first = self.sequences, self.sequences.prompt_length
        growing = [count for b, count in enumerate(sequences.generated) if sequences.unfinished(b)]
        for column in range(self._streamed, end := min(growing) if growing else sequences.final_columns()):
            has_token = torch.tensor([count > column for count in sequences.generated])
            tokens = sequences.tokens[:, first + column].cpu()
            self.streamer.put(torch.where(has_token, tokens, sequences.padding))
        self._streamed = max(self._streamed, end)

    def _begin(self, hidden: torch.Tensor | None = None) -> None:
        self.drafter.begin(self.sequences, hidden)
        self._drafter_has_begun = True
        if self.draft_length is not None:
            self.draft_length.prompt_seconds = self._spend("draft")

    def _propose(self) -> Proposal | None:
        """The drafts of a step; None where the drafter rests, finds none or they would not pay."""
        sequences, drafter, policy, nodes = self.sequences, self.drafter, self.draft_length, MAX_NODES
        if drafter is None:
            return None
        if policy is not None:
            if drafter.watches and policy.watches:
                if not self._drafter_has_begun:
                    self._begin()
                if repeated := drafter.stirs():
                    policy.wake(repeated)
            if policy.rests():
                self._spend("draft")
                return None
        limits = sequences.limits
        if policy is not None:
            limits = policy.depths(limits, self._growing)
            if policy.has_confidence:  # `trim` cuts off more than that
                nodes = min(nodes, policy.max_width(len(limits)))
        if any(limits) and not self._drafter_has_begun:
            self._begin()
        proposal = drafter.propose(limits, nodes) if any(limits) else None
        if proposal is not None and proposal.parents is not None:
            # processors that read ids need those before every node in one sequence, so they take one path only
            if sequences.processors_read_ids or not self.target.takes_trees:
                proposal = proposal.chain()
        if proposal is not None and policy is not None:
            proposal = policy.trim(proposal)
        proposal = proposal and proposal.simplest()
        self._spend("draft")
        return proposal

    def _forward(self, proposal: Proposal | None) -> torch.Tensor | None:
        """The target's logits [rows, width + 1, vocabulary] after each sequence's last token and after each draft; None
        where their argmax is known and nothing else is read."""
        sequences, target, fed, tree = self.sequences, self.target, self.sequences.last(1), None
        if proposal is not None:
            fed = torch.cat([fed, proposal.tokens], 1)
            if proposal.parents is not None:
                tree = self._tree = ancestors(proposal.parents)
            if sequences.processors_read_ids:
                sequences.write(proposal.tokens)
        self._fed, counts = fed, None
        if self.drafter is not None and target.packs and (proposal is not None or self._leaves_out_ended(len(fed))):
            drafts = [0] * len(fed) if proposal is None else proposal.counts.tolist()
            counts = [(1 + count) * sequences.unfinished(b) for b, count in zip(sequences.live, drafts)]
        first = [total - 1 for total in self._generated()]
        logits = target(fed.to(target.device), first, tree=tree, counts=counts)
        self.statistics.steps += 1
        return None if logits is None else logits.to(sequences.device)

    def _step(self, logits: torch.Tensor | None, proposal: Proposal | None) -> bool:
        """Takes the tokens that follow from `logits`. Returns whether any sequence goes on."""
        sequences, target, drafter = self.sequences, self.target, self.drafter
        is_tree = proposal is not None and proposal.parents is not None
        width = 0 if proposal is None else proposal.width
        scores = logits if self.takes_argmax else sequences.process(logits)
        uniforms = None  # without a drafter the random numbers are those of transformers' loop
        if self.do_sample and drafter is not None:
            depth = self._tree.sum(-1) - 1 if is_tree else torch.arange(width + 1).expand(len(scores), -1)
            uniforms = sequences.uniforms(depth)
        choice = target.argmax if self.takes_argmax else None
        verified = verify(scores, proposal, self.do_sample, self.acceptance, uniforms, choice)
        counts = None if proposal is None else proposal.counts
        collected = (scores, logits)
        if is_tree and sequences.collects:
            index = pad(verified.path + 1, (1, 0))[..., None]
            collected = [x.gather(1, index.expand(-1, -1, x.shape[-1])) for x in collected]
        new, accepted, drafted = sequences.extend(verified.tokens, verified.accepted, counts, *collected)
        depths, columns = drafted, None  # columns: of the forward, that each sequence's new tokens follow
        if is_tree:
            depths, paths = depths_of(proposal), zip(verified.path.tolist(), new)
            columns = [[0, *(node + 1 for node in path[: len(kept) - 1])] for path, kept in paths]
        verify_seconds = self._spend("verify")
        if self.statistics.steps:
            self._learn(proposal, new, accepted, drafted, depths, verify_seconds)
        self._stream()
        if drafter is not None and self.statistics.steps:
            self._spend("host")
            if proposal is not None and drafter.reads_logits:
                has_ended = torch.tensor([not kept for kept in new], device=counts.device)
                drafter.observe(self._fed, counts.masked_fill(has_ended, -1), logits)
            if self._drafter_has_begun:
                drafter.accept(new, self._hidden_of(columns, max(map(len, new))))
            self._spend("draft")
        # the last token of a sequence is the target's own: no forward has read it
        if is_tree:
            target.keep([some if kept else [] for some, kept in zip(columns, new)])
        return self._select()

    def _learn(self, proposal, new, accepted, drafted, depths, verify_seconds: float) -> None:
        """Counts a step, and tells the draft length's policy of it."""
        for row, b in enumerate(self.sequences.live):
            if new[row]:
                self.statistics.add(b, drafted[row], depths[row], accepted[row])
        if self.draft_length is not None:
            target, seconds = self.target, (self._draft_seconds, verify_seconds)
            self.draft_length.update(proposal, accepted, depths, *seconds, target.is_steady, target.computed)

    def _select(self, following: ArrivingTokens | None = None) -> bool:
        """Lets finished sequences leave and rewinds the cache to what is accepted. Returns whether any goes on.

        following: of the forward that is queued already, which has read the newest token of every sequence.
        """
        sequences, target = self.sequences, self.target
        going = [row for row, b in enumerate(sequences.live) if sequences.unfinished(b)]
        self._growing = len(going)
        self._going = list(range(len(sequences.live)))
        if self._others_leave(going):
            self._going = going
            sequences.select(going)
            target.select(going)
            if following is not None:
                following.select(going)
            if self.draft_length is not None:
                self.draft_length.select(going, max(sequences.generated[b] for b in sequences.live))
            if self._drafter_has_begun and self.statistics.steps:
                self.drafter.select(going)
        unread = 0 if following is not None and going else 1  # newest tokens that no forward has read
        self._settled = [total - unread for total in self._generated()]
        target.rewind(self._settled)
        self._spend("host")
        return bool(going)

    def _others_leave(self, going: list[int]) -> bool:
        """Whether all sequences but `going` leave the batch now."""
        rows = len(self.sequences.live)
        if self.keep_finished or not going or len(going) == rows:
            return False
        if self.target.captured is None:
            return True
        if self.drafter is not None and self.target.packs and not self.drafter.computes:
            return False  # they take no token of a forward
        # each number of sequences is a capture of its own: they are halved, and where a capture pays in the tokens to
        # come
        pays = max(self.sequences.limits) >= MIN_TOKENS_TO_CAPTURE or not self.target.capture_seconds(len(going), 1)
        return len(going) <= rows // 2 and pays

    def _leaves_out_ended(self, rows: int) -> bool:
        """Whether sequences that have ended take no token of a plain step: where that needs no capture, or pays for one
        as in `_others_leave`."""
        if self._growing == rows:
            return False
        is_long = self._growing <= rows // 2 and max(self.sequences.limits) >= MIN_TOKENS_TO_CAPTURE
        return is_long or not self.target.packed_capture_seconds(rows, self._growing)

    def _generated(self) -> list[int]:
        """Generated tokens of each live sequence."""
        return [length - self.sequences.prompt_length for length in self.sequences.lengths]

    def _hidden_of(self, columns: list[list[int]] | None, longest: int) -> torch.Tensor | None:
        """The hidden states of the last forward that predicted each new token, float [rows, longest, hidden size], in
        these columns of each sequence; None: the first ones."""
        hidden = self.target.hidden
        if hidden is None:
            return None
        if columns is None or all(some == list(range(len(some))) for some in columns):
            return hidden[:, :longest].clone()  # the next forward may overwrite it
        padded = [(some + [0] * longest)[:longest] for some in columns]
        index = torch.tensor(padded, device=hidden.device)[..., None]
        return hidden.gather(1, index.expand(-1, -1, hidden.shape[-1]))

    def _spend(self, name: str) -> float:
        """Counts the seconds since the last call as those of `name`, and returns them."""
        now = perf_counter()
        seconds, self._since = now - self._since, now
        self.seconds[name] += seconds
        if name == "draft":
            self._draft_seconds = seconds
        return seconds
