"""The instructions that each kernel spends on a number it reads, counted in the machine code."""

import pytest
import sass
from kernel_counts import CASES


LARGEST_BLOCK = {"sm_86": 99, "sm_89": 99, "sm_120": 99}  # KiB of shared memory


WITHIN = [case for case in CASES if case.budget and case.name != "prefill, heads of 128 channels"]


@pytest.mark.parametrize("target", ["sm_90", "sm_80"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_counts_do_not_grow(case, target):
    """docs/gpus.md says which budgets are not reached."""
    assert case.instructions(target) <= case.held[target == "sm_80"]
    for loop in sass.loops(case.compiled(target).machine_code):  # outside, addresses for the end of a lane may spill
        assert sass.count(loop, "LDL", "STL") <= case.spilled


@pytest.mark.parametrize("case", WITHIN, ids=lambda case: case.name)
def test_budgets_are_met(case):
    """On sm_90, of which the budgets are."""
    assert case.instructions("sm_90") <= case.budget


@pytest.mark.parametrize("case", [case for case in CASES if case.name.startswith("decode")], ids=lambda case: case.name)
def test_four_programs_of_decoding_fit_a_multiprocessor(case):
    """By their registers, of which there are 65,536, and by 227 KiB of shared memory on sm_90."""
    compiled = case.compiled("sm_90")
    assert 65536 // (case.threads * compiled.registers) >= 4 and 4 * (compiled.shared + 1024) <= 227 * 1024


@pytest.mark.parametrize(
    "target, case",
    [
        *(("sm_120", CASES[place]) for place in (0, 4, 6, 9, 11)),
        *(("sm_86", CASES[place]) for place in (4, 6, 9)),
        *(("sm_89", CASES[place]) for place in (0, 11)),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_other_cards(case, target):
    compiled = case.compiled(target)
    assert (compiled.local_bytes == 0 or case.name.startswith("decode")) and compiled.shared <= LARGEST_BLOCK[
        target
    ] * 1024
    assert sass.loops(compiled.machine_code), "a matrix instruction stands in a loop"


def test_loops_are_innermost_and_hold_what_is_asked_for():
    code = """
        /*0010*/                   MOV R1, R2 ;
        /*0020*/                   LDS R4, [R1] ;
        /*0030*/                   HMMA.16816.F32 R4, R4, R6, R8 ;
        /*0040*/               @P0 BRA 0x20 ;
        /*0050*/                   FADD R1, R1, R2 ;
        /*0060*/              @!P1 BRA 0x10 ;
        /*0070*/                   FADD R1, R1, R2 ;
        /*0080*/               @P2 BRA 0x70 ;
    """
    assert sass.loops(code) == [["LDS", "HMMA.16816.F32", "BRA"]]
    outer = ["MOV", "LDS", "HMMA.16816.F32", "BRA", "FADD", "BRA"]
    assert sass.loops(code, ("FADD",)) == [outer, ["FADD", "BRA"]], "the longest first"
