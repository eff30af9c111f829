"""A share of the suite: every test function, with a part of its cases.

CI runs for each change, and most of its time would be cases of parametrized tests: architectures, formats, dtypes.
`TESTS_SHARE=2/4` keeps a quarter of the cases of every function, and at least one. Of what is marked slow it keeps a
quarter and no more. `.ci/run` takes the share from the number of commits. Without the variable all run, as in
`make test`.

Cases of one instruction set, or of one target of Triton's compiler, stay together: they share what is compiled for
them. This CPU's best instruction set is the exception: its libraries are compiled anyway.
"""

import os
import zlib
from collections import defaultdict


VARIABLE = "TESTS_SHARE"
COMPILED = ("tier", "tier_or_torch", "target")  # parameters that name what a kernel is compiled for


def select(items: list, best: str) -> list:
    """Those of the collected pytest `items` that belong to the share of the environment; all without one.

    best: the tier whose cases are dealt one by one. Raises ValueError for a share that is none."""
    asked = os.environ.get(VARIABLE)
    if not asked:
        return items
    share, of = _parse(asked)
    compiled_for = {id(item): _compiled_for(item, best) for item in items}
    numbers = {name: number for number, name in enumerate(sorted(set(compiled_for.values()) - {None}))}
    functions = defaultdict(list)
    for item in items:
        functions[item.nodeid.split("[")[0]].append(item)
    kept = set()
    for cases in functions.values():
        alone = [case for case in cases if compiled_for[id(case)] is None] or cases
        mine = [
            case
            for case in cases
            if (numbers.get(compiled_for[id(case)], zlib.crc32(case.nodeid.encode())) - share) % of == 0
        ]
        if not mine and not cases[0].get_closest_marker("slow"):
            mine = [alone[share % len(alone)]]
        kept.update(map(id, mine))
    return [item for item in items if id(item) in kept]


def _parse(asked: str) -> tuple[int, int]:
    """(share, number of shares) of "6/4", where 6 stands for 2."""
    try:
        share, of = map(int, asked.split("/"))
        return share % of, of
    except (ValueError, ZeroDivisionError):
        raise ValueError(f'{VARIABLE}={asked!r}: allowed are two whole numbers, "2/4" for the third of four') from None


def _compiled_for(item, best: str) -> str | None:
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    named = next((str(parameters[name]) for name in COMPILED if name in parameters), None)
    return None if named in (best, "torch") else named
