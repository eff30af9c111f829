"""Regular expressions of a checkpoint's config, matched in a bounded number of steps.

Python's `re` tries one way through a pattern after the other, and "(a+)+$" has exponentially many. This matcher asks,
for each part of a pattern and each place in a name, at which places a match can end: at most once each.
"""

import re
from functools import partial


try:
    from re import _constants as code
    from re import _parser as parser
except ImportError:  # Python 3.10
    import sre_constants as code
    import sre_parse as parser


LONGEST = 1000  # characters of a pattern
STEPS = 2000  # of a match, on average over those of a checkpoint
_SPARE = 200_000  # steps for all of them together beyond that
_CATEGORIES = {
    code.CATEGORY_DIGIT: str.isdecimal,
    code.CATEGORY_NOT_DIGIT: lambda c: not c.isdecimal(),
    code.CATEGORY_SPACE: str.isspace,
    code.CATEGORY_NOT_SPACE: lambda c: not c.isspace(),
    code.CATEGORY_WORD: lambda c: c.isalnum() or c == "_",
    code.CATEGORY_NOT_WORD: lambda c: not (c.isalnum() or c == "_"),
}


class TargetPatterns:
    """Matches patterns against names as `re.match` does, which finds where a name begins with one. `field` is what the
    patterns stand in, for errors."""

    def __init__(self, field: str):
        self.field, self._left, self._parsed, self._pattern = field, _SPARE, {}, None

    def matches(self, pattern: str, name: str) -> bool:
        """Raises ValueError for a pattern that is none, is longer than `LONGEST`, has back-references, look-behind,
        flags or possessive parts, or takes too many steps."""
        self._pattern, self._left = pattern, self._left + STEPS
        if pattern not in self._parsed:
            self._parsed[pattern] = list(self._parse(pattern))
        return bool(self._ends({}, self._parsed[pattern], name, 0))

    def _parse(self, pattern: str):
        if len(pattern) > LONGEST:
            raise self._error(f"at most {LONGEST} characters long, not {len(pattern)}")
        try:
            parsed = parser.parse(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise self._error(f"a regular expression: {error}") from None
        if parsed.state.flags & ~re.UNICODE:
            raise self._error("without flags")
        return parsed

    def _error(self, allowed: str) -> ValueError:
        return ValueError(
            f"quantization_config: {self.field}={self._pattern[:100]!r} is not supported: it must be {allowed}"
        )

    def _ends(self, known: dict, items, name: str, start: int) -> set[int]:
        """Where matches of `items`, one after the other, that begin at `start` can end. known: (item, start) ->
        ends."""
        places = {start}
        for item in items:
            places = set().union(*(self._item(known, item, name, place) for place in places))
        return places

    def _item(self, known: dict, item, name: str, start: int) -> set[int]:
        self._left -= 1
        if self._left < 0:
            raise self._error(f"matched in {STEPS} steps a name")
        key = id(item), start
        if key not in known:
            known[key] = self._item_ends(*item, name, start, partial(self._ends, known))
        return known[key]

    def _item_ends(self, kind, value, name: str, start: int, ends):
        character = name[start : start + 1]
        if kind in (code.LITERAL, code.NOT_LITERAL, code.ANY, code.IN):
            return {start + 1} if character and _accepts(kind, value, character) else set()
        if kind is code.SUBPATTERN and not value[1] and not value[2]:
            return ends(value[3].data, name, start)
        if kind is code.BRANCH:
            return set().union(*(ends(branch.data, name, start) for branch in value[1]))
        if kind in (code.MAX_REPEAT, code.MIN_REPEAT):
            return self._repeated(value, name, start, ends)
        if kind is code.AT:
            return {start} if _is_at(value, name, start) else set()
        if kind in (code.ASSERT, code.ASSERT_NOT) and value[0] == 1:
            return {start} if bool(ends(value[1].data, name, start)) is (kind is code.ASSERT) else set()
        raise self._error("of literals, classes, groups, alternatives, repetitions and look-ahead")

    @staticmethod
    def _repeated(value, name: str, start: int, ends):
        low, high, item = value
        places, found, count = {start}, {start} if low == 0 else set(), 0
        while places and count < high:
            new = set().union(*(ends(item.data, name, place) for place in places))
            count += 1
            if count <= low and new == places:  # and will be for ever
                return found | new
            places = new if count < low else new - found
            if count >= low:
                found |= new
        return found


def _accepts(kind, value, character: str) -> bool:
    if kind is code.ANY:
        return character != "\n"
    if kind is not code.IN:
        return (chr(value) == character) is (kind is code.LITERAL)
    negated = bool(value) and value[0][0] is code.NEGATE
    for inner, operand in value[negated:]:
        if inner is code.LITERAL and chr(operand) == character:
            return not negated
        if inner is code.RANGE and operand[0] <= ord(character) <= operand[1]:
            return not negated
        if inner is code.CATEGORY and _CATEGORIES[operand](character):
            return not negated
    return negated


def _is_at(where, name: str, place: int) -> bool:
    if where in (code.AT_BEGINNING, code.AT_BEGINNING_STRING):
        return place == 0
    if where is code.AT_END:
        return place == len(name) or name[place:] == "\n"
    if where is code.AT_END_STRING:
        return place == len(name)
    before, after = (
        bool(part and _CATEGORIES[code.CATEGORY_WORD](part)) for part in (name[:place][-1:], name[place:][:1])
    )
    return (before != after) is (where is code.AT_BOUNDARY)
