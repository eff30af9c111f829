"""All substrings of a sequence that grows token by token, with where and how often each of them occurred."""

_RUN = 4  # tokens that `RepeatWatch` compares at once
_MAX_SUFFIXES = 32  # that count a new occurrence, longest first: bounds the work on periodic sequences


class SuffixAutomaton:
    """The suffix automaton of a list of tokens (Blumer et al. 1985; for drafts Hu et al. 2024, "SAM Decoding"), grown
    in O(1) amortised a token.

    A state stands for the substrings that end at the same positions; state 0 is the empty string. Lists by state:
    length: of its longest substring.
    link: the state of its longest suffix that also ends elsewhere.
    following: token -> the state it leads to.
    count, latest: how often the substring occurred, and where it ended last. In very long periods the shorter suffixes
        may miss the newest occurrences.
    """

    def __init__(self):
        self.following: list[dict[int, int]] = [{}]
        self.link, self.length, self.count, self.latest = [-1], [0], [1], [0]
        self.whole = 0  # the state of the whole list

    def append(self, token: int) -> None:
        length, count, latest = self.length, self.count, self.latest
        end, new = length[self.whole] + 1, len(length)
        self._add({}, end, 1, end, 0)
        self.link[new] = self._suffix(self.whole, token, new)
        self.whole = new
        state = self.link[new]
        for _ in range(_MAX_SUFFIXES):
            if state == 0:
                break
            count[state] += 1
            latest[state] = end
            state = self.link[state]

    def _suffix(self, state: int, token: int, new: int) -> int:
        """Lets `token` lead from `state` and its suffixes to `new` where it led nowhere. Returns the state of the
        longest of these strings with which it led somewhere."""
        following, link, length = self.following, self.link, self.length
        while state >= 0 and token not in following[state]:
            following[state][token] = new
            state = link[state]
        if state < 0:
            return 0
        reached = following[state][token]
        if length[reached] == length[state] + 1:
            return reached
        # `token` led there from longer strings, too: `state` and its suffixes get a state of their own
        own = len(length)
        self._add(
            following[reached].copy(), length[state] + 1, self.count[reached], self.latest[reached], link[reached]
        )
        link[reached] = own
        while state >= 0 and following[state].get(token) == reached:
            following[state][token] = own
            state = link[state]
        return own

    def _add(self, following: dict[int, int], length: int, count: int, latest: int, link: int) -> None:
        self.following.append(following)
        self.length.append(length)
        self.count.append(count)
        self.latest.append(latest)
        self.link.append(link)

    def match(self, longest: int | None = None) -> int:
        """The state of the longest suffix, of at most `longest` tokens, that occurred before; 0 when none did."""
        state = max(self.link[self.whole], 0)
        while longest is not None and state and self.length[self.link[state]] >= longest:
            state = self.link[state]
        return state


class Walk:
    """Where the latest tokens of one sequence stand in the text of another: `matched` of them lead to `state`."""

    def __init__(self, text: SuffixAutomaton):
        self.text, self.state, self.matched = text, 0, 0

    def advance(self, token: int) -> None:
        following, link, length = self.text.following, self.text.link, self.text.length
        state = self.state
        while state > 0 and token not in following[state]:
            state = link[state]
            self.matched = min(self.matched, length[state])
        if token in following[state]:
            state = following[state][token]
            self.matched += 1
        self.state = state
        self.settle()

    def settle(self) -> None:
        """After the text has grown: shorter strings of a state may have got one of their own."""
        link, length = self.text.link, self.text.length
        while self.state > 0 and self.matched <= length[link[self.state]]:
            self.state = link[self.state]


class RepeatWatch:
    """Notices when a growing text repeats itself, at a tenth of an automaton's work.

    text: its first tokens. seen: the runs of tokens before, which texts may share.
    """

    def __init__(self, text: list[int], seen: set):
        self._seen, self._last, self._repeated, self._noted = seen, (), 0, 0
        for token in text:
            self.read(token)
        self._repeated = self._noted = 0  # texts with the same beginning repeat nothing yet

    def read(self, token: int) -> None:
        self._last = run = (*self._last[1 - _RUN :], token)
        if run in self._seen:
            self._repeated += 1
            beyond = self._repeated - 1
            if beyond >= _RUN and beyond & (beyond - 1) == 0:
                self._noted = beyond + _RUN
        else:
            self._repeated = 0
            self._seen.add(run)

    @property
    def repeated(self) -> int:
        """How many tokens in a row, up to the last one, have come a second time; 0 for fewer than 8."""
        return self._repeated - 1 + _RUN if self._repeated > _RUN else 0

    def has_repeated(self) -> int:
        """How many tokens in a row have come a second time: 8, 12, 20, 36 and so on, each once; 0 for no such number
        since the last question."""
        noted, self._noted = self._noted, 0
        return noted
