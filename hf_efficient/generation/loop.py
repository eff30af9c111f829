"""The loop of speculative generation: draft, verify all rows in one forward, accept per row, rewind lengths."""

from time import perf_counter

import torch

from hf_efficient.generation.drafters.base import MAX_NODES, Drafter, Proposal
from hf_efficient.generation.output import Statistics
from hf_efficient.generation.ragged_model import RaggedModel
from hf_efficient.generation.sequences import Sequences
from hf_efficient.generation.speculation.draft_length import DraftLength
from hf_efficient.generation.speculation.token_tree import ancestors
from hf_efficient.generation.speculation.verification import TypicalAcceptance, verify


# Tokens that rows may still get: recordings take 10 to 15 steps, and steps of half the rows two thirds of the time or more.
WORTH_RECORDING = 64


class SpeculativeLoop:
    """From the logits after the prompt to the finished rows.

    Args:
        target: its cache holds the prompts.
        drafter: None decodes token by token.
        draft: what is known of the drafter is kept with this.
        sequences: holds the prompts, no token generated yet.
        do_sample, acceptance: as in `verify`.
        adaptive: how many tokens are drafted follows from what pays; else always as many as the drafter may.
        keep_rows: finished rows stay in the target's cache, at their final length; else they leave the batch, where forwards
            are recorded as soon as half of the rows may.
        streamer: is put every token of the only row.
    """

    def __init__(
        self,
        target: RaggedModel,
        drafter: Drafter | None,
        draft,
        sequences: Sequences,
        do_sample: bool,
        acceptance: TypicalAcceptance | None,
        adaptive: bool,
        keep_rows: bool,
        streamer,
    ):
        self.target, self.drafter, self.sequences = target, drafter, sequences
        self.do_sample, self.acceptance, self.keep_rows, self.streamer = do_sample, acceptance, keep_rows, streamer
        self.statistics = Statistics(sequences.batch_size)
        self.length = None
        if adaptive and drafter is not None:
            timed = not (drafter.draws and do_sample)
            self.length = DraftLength(
                target.model,
                sequences.batch_size,
                drafter.max_tokens,
                timed,
                drafter.relative_cost,
                target.padded,
                target.capture_seconds,
                draft,
            )
        self.seconds = dict.fromkeys(("draft", "verify", "host"), 0.0)
        self._since = perf_counter()
        self._begun = False

    def run(self, logits: torch.Tensor) -> None:
        """logits: float [rows, vocabulary], after the prompts."""
        sequences, drafter, target = self.sequences, self.drafter, self.target
        prompt_hidden = target.hidden
        if self._step(logits[:, None].to(sequences.device), None):
            if drafter is not None and drafter.reads_hidden:
                if self.length is None or not self.length.sits_out(max(sequences.limits)):
                    self._begin(prompt_hidden[self._rows])
            self._spend("draft")
            self.seconds = dict.fromkeys(self.seconds, 0.0)  # the first token is the prompt's
            while True:
                proposal = self._propose()
                logits = self._forward(proposal)
                if not self._step(logits, proposal):
                    break
        if self.length is not None:
            self.length.end()
        for name, seconds in self.seconds.items():
            setattr(self.statistics, f"{name}_seconds", seconds)

    def _begin(self, hidden: torch.Tensor | None = None) -> None:
        self.drafter.begin(self.sequences, hidden)
        self._begun = True
        if self.length is not None:
            self.length.starting = self._spend("draft")

    def _propose(self) -> Proposal | None:
        sequences, drafter, limits, nodes = self.sequences, self.drafter, self.sequences.limits, MAX_NODES
        if drafter is None:
            return None
        if self.length is not None:
            depth = self.length.choose(limits)
            limits = [min(limit, depth) for limit in limits]
            if self.length.tells_itself:  # and more would be cut off
                nodes = min(nodes, self.length.widest(len(limits)))
        if any(limits) and not self._begun:
            self._begin()
        proposal = drafter.propose(limits, nodes) if any(limits) else None
        if proposal is not None and proposal.parents is not None:
            # processors that read ids want those before every node, which stand in a row for one path only
            if sequences.processors_read_ids or not self.target.takes_trees:
                proposal = proposal.chain()
        if proposal is not None and self.length is not None:
            proposal = self.length.cut(proposal)
        self._spend("draft")
        return proposal

    def _forward(self, proposal: Proposal | None) -> torch.Tensor:
        """The target's logits after the last token of each row and after each draft, [rows, width + 1, vocabulary]."""
        sequences, target, fed, tree = self.sequences, self.target, self.sequences.last(1), None
        if proposal is not None:
            fed = torch.cat([fed, proposal.tokens], 1)
            if proposal.parents is not None:
                tree = self._tree = ancestors(proposal.parents)
            if sequences.processors_read_ids:
                sequences.write(proposal.tokens)
        self._fed = fed
        logits = target(fed.to(target.model.device), [total - 1 for total in self._done()], tree=tree)
        self.statistics.steps += 1
        return logits.to(sequences.device)

    def _step(self, logits: torch.Tensor, proposal: Proposal | None) -> bool:
        """Takes the tokens that follow from `logits`. Returns whether any row goes on."""
        sequences, target, drafter = self.sequences, self.target, self.drafter
        is_tree = proposal is not None and proposal.parents is not None
        width = 0 if proposal is None else proposal.width
        bare = sequences.are_bare and not self.do_sample and self.acceptance is None
        scores = logits if bare else sequences.process(logits)  # the largest can be found as they are
        uniforms = None  # without a drafter the draws are those of plain generation
        if self.do_sample and drafter is not None:
            depth = self._tree.sum(-1) - 1 if is_tree else torch.arange(width + 1).expand(len(scores), -1)
            uniforms = sequences.uniforms(depth)
        choice = target.largest if bare else None
        verified = verify(scores, proposal, self.do_sample, self.acceptance, uniforms, choice)
        counts = torch.zeros_like(verified.accepted) if proposal is None else proposal.counts
        collected = (scores, logits)
        if is_tree and sequences.collects:
            places = torch.nn.functional.pad(verified.path + 1, (1, 0))[..., None]
            collected = [x.gather(1, places.expand(-1, -1, x.shape[-1])) for x in collected]
        new, accepted, drafted = sequences.extend(verified.tokens, verified.accepted, counts, *collected)
        depths, path = drafted, None
        if is_tree:
            real = torch.arange(width, device=counts.device) < counts[:, None]
            depths = (torch.where(real, self._tree[:, 1:].sum(-1) - 1, 0)).amax(1).tolist()
            path = verified.path.tolist()
        verify_seconds = self._spend("verify")
        if self.statistics.steps:
            for row, b in enumerate(sequences.live):
                if new[row]:
                    self.statistics.add(b, drafted[row], depths[row], accepted[row])
            if self.length is not None:
                settled = self.target.settled
                self.length.learn(proposal, accepted, depths, self._draft_seconds, verify_seconds, settled)
        if self.streamer is not None:
            for token in new[0]:
                self.streamer.put(torch.tensor([token]))
        if drafter is not None and self.statistics.steps:
            self._spend("host")
            if proposal is not None and drafter.reads_logits:
                drafter.observe(self._fed, counts, logits)
            if self._begun:
                drafter.accept(new, self._hidden_of(verified.path, max(map(len, new))))
            self._spend("draft")
        # the last token of a row is the target's own and was never fed
        if is_tree:
            columns = [[0, *(node + 1 for node in nodes[: len(kept) - 1])] for nodes, kept in zip(path, new)]
            target.keep([some if kept else [] for some, kept in zip(columns, new)])
        going = [row for row, b in enumerate(sequences.live) if sequences.unfinished(b)]
        self._rows = list(range(len(sequences.live)))
        if self._leave(going):
            self._rows = going
            sequences.select(going)
            target.select(going)
            if self.length is not None:
                self.length.select(going)
            if self._begun and self.statistics.steps:
                drafter.select(going)
        target.rewind([total - 1 for total in self._done()])
        self._spend("host")
        return bool(going)

    def _leave(self, going: list[int]) -> bool:
        """Whether all rows but `going` leave the batch now: with recordings for every number of rows by halves, and where
        the others may go on long enough for what recordings take."""
        rows = len(self.sequences.live)
        if self.keep_rows or not going or len(going) == rows:
            return False
        if self.target.captured is None:
            return True
        worth = max(self.sequences.limits) >= WORTH_RECORDING or not self.target.capture_seconds(len(going), 1)
        return len(going) <= rows // 2 and worth

    def _done(self) -> list[int]:
        """Generated tokens of each live row."""
        return [length - self.sequences.prompt_length for length in self.sequences.lengths]

    def _hidden_of(self, path: torch.Tensor, longest: int) -> torch.Tensor | None:
        """float [rows, longest, hidden size]: of the last forward, what predicted each token that was kept."""
        hidden = self.target.hidden
        if hidden is None:
            return None
        places = torch.nn.functional.pad(path + 1, (1, 0))[:, :longest, None].to(hidden.device)
        return hidden.gather(1, places.expand(-1, -1, hidden.shape[-1]))

    def _spend(self, name: str) -> float:
        """Counts the time since the last call as that of `name`, and returns it."""
        now = perf_counter()
        seconds, self._since = now - self._since, now
        self.seconds[name] += seconds
        if name == "draft":
            self._draft_seconds = seconds
        return seconds
