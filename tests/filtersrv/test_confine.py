"""What the kernel is told to let through. What that keeps a class from is shown in test_filters.py."""

from __future__ import annotations

import struct

import pytest

from cometmq.filtersrv.confine import CALLS, MACHINES, filter_program

ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050001, 0x80000000
X86_64, AARCH64 = (MACHINES[name] for name in ("x86_64", "aarch64"))


def decided(program: bytes, machine: int, call: int) -> int:
    """What the kernel would do: an interpreter of the three instructions that the program has."""
    given, loaded, at = {0: call, 4: machine}, 0, 0
    steps = list(struct.iter_unpack("=HBBI", program))
    while True:
        code, if_equal, otherwise, value = steps[at]
        at += 1
        if code == 0x06:
            return value
        if code == 0x20:
            loaded = given[value]
        else:
            assert code == 0x15
            at += if_equal if loaded == value else otherwise


@pytest.mark.parametrize("machine", [X86_64, AARCH64])
def test_the_calls_that_are_named_pass_and_all_others_fail(machine):
    number, column = machine
    program = filter_program(number, column)
    allowed = {numbers[column] for numbers in CALLS.values()}
    assert {call for call in range(1024) if decided(program, number, call) == ALLOW} == allowed
    assert {decided(program, number, call) for call in range(1024)} == {ALLOW, REFUSE}
    assert decided(program, number, 0x40000000) == REFUSE  # read() of x32


@pytest.mark.parametrize(
    ("machine", "other"), [(X86_64, AARCH64), (AARCH64, X86_64), (X86_64, (0x40000003, 0))]
)
def test_calls_in_the_way_of_another_machine_kill(machine, other):
    assert decided(filter_program(*machine), other[0], 0) == KILL
