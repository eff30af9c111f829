"""Shares of the suite: together they are all of it, and each has every function that is not slow."""

from types import SimpleNamespace

import pytest
import shares


def items():
    """Functions without parameters, one of 9 cases, one of 2, one whose cases are of a tier, and one of targets."""
    named = [*(f"test_a.py::test_slow_{i}" for i in range(8))]
    named += ["test_a.py::test_alone", *(f"test_a.py::test_many[{i}]" for i in range(9))]
    named += ["test_a.py::test_two[x]", "test_a.py::test_two[y[0]]"]
    tiers = [
        (f"test_b.py::test_tiers[{tier}-{i}]", {"tier": tier}) for tier in ("avx2", "neon", "vnni") for i in range(6)
    ]
    targets = [(f"test_b.py::test_aot[{name}]", {"target": name}) for name in ("gfx942", "sm_80", "sm_90", "sm_100")]
    simple = [SimpleNamespace(nodeid=name) for name in named]
    simple += [
        SimpleNamespace(nodeid=name, callspec=SimpleNamespace(params=params)) for name, params in tiers + targets
    ]
    for item in simple:
        item.get_closest_marker = lambda name, item=item: name == "slow" and "slow" in item.nodeid
    return simple


def test_four_shares_are_the_suite_and_each_has_every_function(monkeypatch):
    every, selected = items(), []
    functions = {item.nodeid.split("[")[0] for item in every if "slow" not in item.nodeid}
    for share in range(4):
        monkeypatch.setenv(shares.VARIABLE, f"{share}/4")
        mine = shares.select(every, best="vnni")
        assert {item.nodeid.split("[")[0] for item in mine if "slow" not in item.nodeid} == functions
        assert sum("slow" in item.nodeid for item in mine) < 8
        assert mine == [item for item in every if item in mine], "the order of collection"
        selected.append({item.nodeid for item in mine})
    assert set.union(*selected) == {item.nodeid for item in every}
    assert max(map(len, selected)) < len(every) * 0.7
    monkeypatch.setenv(shares.VARIABLE, "6/4")
    assert {item.nodeid for item in shares.select(every, best="vnni")} == selected[2]


def test_cases_of_a_tier_stay_together_but_for_the_best(monkeypatch):
    found = {"avx2": set(), "neon": set(), "vnni": set()}
    for share in range(4):
        monkeypatch.setenv(shares.VARIABLE, f"{share}/4")
        for item in shares.select(items(), best="vnni"):
            for tier in found:
                if f"[{tier}-" in item.nodeid:
                    found[tier].add(share)
    assert len(found["avx2"]) == len(found["neon"]) == 1
    assert len(found["vnni"]) > 1


def test_without_the_variable_all_run_and_a_wrong_one_is_refused(monkeypatch):
    monkeypatch.delenv(shares.VARIABLE, raising=False)
    assert len(shares.select(items(), best="vnni")) == len(items())
    for wrong in ("2", "1/0", "a/4", "1/2/3"):
        monkeypatch.setenv(shares.VARIABLE, wrong)
        with pytest.raises(ValueError, match="TESTS_SHARE"):
            shares.select(items(), best="vnni")
