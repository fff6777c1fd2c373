"""Reasons that prevent a filter server from running on a machine that cannot confine classes.

Also the system calls that classes may make where it can. test_filters.py shows the forbidden actions.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pyseccomp
import pytest

from cometmq.filtersrv import filters
from cometmq.filtersrv.confine import ALLOWED_CALLS, CannotConfine, confine
from cometmq.filtersrv.filters import check

MACHINES = ("X86_64", "AARCH64", "PPC64LE", "S390X", "RISCV64")


@pytest.mark.parametrize("machine", MACHINES)
def test_the_system_calls_are_known_by_name_on_every_machine(machine):
    numbers = {
        call: pyseccomp.resolve_syscall(getattr(pyseccomp.Arch, machine), call) for call in ALLOWED_CALLS
    }
    assert -1 not in numbers.values()
    missing = {call for call, number in numbers.items() if number < 0}
    assert missing <= {"mmap2", "futex_time64", "clock_gettime64", "sigreturn"}  # only on 32-bit systems


def test_without_the_library_nothing_runs_and_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyseccomp", None)
    with pytest.raises(CannotConfine, match=r"install cometmq\[filter-server\] .*libseccomp"):
        confine(os.getppid())


def test_on_this_machine_classes_can_be_confined():
    check()


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        (("no-such-program",), "No such file or directory: 'no-such-program'"),
        ((sys.executable, "-c", "raise SystemExit('refused')"), "refused"),
        ((sys.executable, "-I", filters.worker.__file__, "1"), "CannotConfine: the filter server has ended"),
    ],
)
def test_a_worker_that_cannot_be_confined_is_told_apart(monkeypatch, argument, words):
    monkeypatch.setattr(filters, "worker_command", lambda: list(argument))
    with pytest.raises(CannotConfine, match=words):
        check()


@pytest.mark.parametrize(
    ("patch", "code", "words"),
    [
        (
            "filters.worker_command = lambda: ['no-such-program']",
            os.EX_UNAVAILABLE,
            "filter classes cannot be confined on this machine, so none is run: .*no-such-program",
        ),
        (
            "from unittest.mock import Mock\n"
            "filters.subprocess.run = Mock(side_effect=BlockingIOError(11, 'no process'))",
            1,
            "the filter server cannot run: .*no process",
        ),
    ],
    ids=["for good", "for now"],
)
def test_a_filter_server_that_cannot_confine_says_so_and_ends(patch, code, words):
    program = (
        f"import sys\nfrom cometmq.filtersrv import filters, process\n{patch}\nsys.exit(process.main())\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert ended.returncode == code
    assert re.search(words, ended.stderr)
