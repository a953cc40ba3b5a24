"""The filter of system calls, line by line, for each processor: also for the one that the tests do not run on.

The numbers are those of the kernel's tables, written down here once more, so that a slip in ours is found.
"""

from __future__ import annotations

import errno
import os
import sys

import pytest

from perdure.commands import confine
from tests.commands.conftest import Commands, printed

ALLOWED = 0
X86, ARM = 0, 1
ARCHITECTURE = {X86: 0xC000003E, ARM: 0xC00000B7}
I386 = 0x40000003


def judged(column: int, number: int, *args: int, architecture: int | None = None, rules: str = "") -> int:
    """The errno with which a call is refused, or 0: a run of the kernel's virtual machine."""
    fields = [field.encode() for field in (rules or "how namespaces").split(",")]
    program = confine.filter_program(column, confine.Rules(fields))
    head = number.to_bytes(4, sys.byteorder)
    head += (ARCHITECTURE[column] if architecture is None else architecture).to_bytes(4, sys.byteorder) + bytes(8)
    data = head + b"".join(each.to_bytes(8, sys.byteorder) for each in (*args, *[0] * (6 - len(args))))
    at = value = 0
    while True:
        line = program[8 * at : 8 * at + 8]
        code, yes, no = int.from_bytes(line[:2], sys.byteorder), line[2], line[3]
        given = int.from_bytes(line[4:], sys.byteorder)
        at += 1
        match code:
            case 0x20:
                value = int.from_bytes(data[given : given + 4], sys.byteorder)
            case 0x54:
                value &= given
            case 0x06:
                return given & 0xFFFF if given >> 16 == 5 else ALLOWED
            case 0x15:
                at += yes if value == given else no
            case 0x45:
                at += yes if value & given else no
            case 0x35:
                at += yes if value >= given else no
            case _:
                raise AssertionError(f"no such code: {code}")


CALLS = {
    "read": (0, 63), "openat": (257, 56), "ioctl": (16, 29), "socket": (41, 198), "socketpair": (53, 199),
    "clone": (56, 220), "clone3": (435, 435), "fchmodat": (268, 53), "fchmodat2": (452, 452), "mknodat": (259, 33),
    "fchmod": (91, 52), "openat2": (437, 437), "file_setattr": (469, 469), "setpriority": (141, 140),
}  # fmt: skip
REFUSED = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438),
    "kcmp": (312, 272), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "bpf": (321, 280),
    "userfaultfd": (323, 282), "perf_event_open": (298, 241), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsmount": (432, 432), "mount_setattr": (442, 442), "unshare": (272, 97),
    "setns": (308, 268), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262), "init_module": (175, 105),
    "finit_module": (313, 273), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142),
    "swapon": (167, 224), "clock_settime": (227, 112), "syslog": (103, 116),
}  # fmt: skip
columns = pytest.mark.parametrize("column", [X86, ARM], ids=["x86_64", "aarch64"])


@columns
def test_calls_are_refused_and_others_are_not(column: int) -> None:
    found = {name: judged(column, number[column]) for name, number in REFUSED.items()}

    assert found == dict.fromkeys(REFUSED, errno.EPERM)
    assert judged(column, CALLS["read"][column]) == ALLOWED


@columns
@pytest.mark.parametrize("architecture", [I386, *ARCHITECTURE.values()])
def test_calls_of_another_processor_are_refused_whatever_their_number(column: int, architecture: int) -> None:
    refused = 0 if architecture == ARCHITECTURE[column] else errno.EPERM

    assert judged(column, CALLS["read"][column], architecture=architecture) == refused


def test_calls_of_x32_are_refused_whatever_their_number() -> None:
    assert judged(X86, confine.X32) == errno.EPERM
    assert judged(X86, confine.X32 | 41, 2) == errno.EPERM
    assert judged(ARM, CALLS["read"][ARM]) == ALLOWED


ARGUMENTS: tuple[tuple[str, tuple[int, ...], int], ...] = (
    ("socket", (1,), errno.EPERM),
    ("socket", (2,), 0),
    ("socket", (17,), errno.EPERM),
    ("socket", (40,), errno.EPERM),
    ("socketpair", (1, 1), 0),
    ("socketpair", (1, 0o2000000 | 1), 0),
    ("socketpair", (1, 2), errno.EPERM),
    ("clone", (17,), 0),
    ("clone", (0x10000000 | 17,), errno.EPERM),
    ("clone", (0x20000,), errno.EPERM),
    ("clone3", (), errno.ENOSYS),
    ("ioctl", (0, 0x5413), 0),
    ("ioctl", (0, 0x5412), errno.EPERM),
    ("ioctl", (0, (1 << 32) | 0x5412), errno.EPERM),
    ("ioctl", (0, 0x541C), errno.EPERM),
    ("ioctl", (0, 0x40086602), 0),
    ("fchmod", (3, 0o755), 0),
    ("fchmod", (3, 0o4755), errno.EPERM),
    ("fchmod", (3, 0o2755), errno.EPERM),
    ("fchmodat", (0, 0, 0o4755), errno.EPERM),
    ("fchmodat2", (0, 0, 0o2755), errno.EPERM),
    ("mknodat", (0, 0, 0o104755), errno.EPERM),
    ("openat", (0, 0, 0o101, 0o644), 0),
    ("openat", (0, 0, 0o101, 0o4755), errno.EPERM),
    ("openat", (0, 0, 0, 0o4755), 0),
    ("openat2", (), errno.ENOSYS),
)


@columns
def test_calls_are_judged_by_their_arguments(column: int) -> None:
    found = tuple((name, args, judged(column, CALLS[name][column], *args)) for name, args, _ in ARGUMENTS)

    assert found == ARGUMENTS


@columns
@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("ioctl", (0, 0x40086602)),
        ("ioctl", (0, 0x401C5820)),
        ("ioctl", (0, 0x40806685)),
        ("ioctl", (0, 0x5412)),
        ("fchmod", (3, 0o755)),
        ("file_setattr", ()),
        ("socket", (2,)),
        ("setpriority", (0, 7)),
    ],
)
def test_without_namespaces_more_is_refused(column: int, name: str, args: tuple[int, ...]) -> None:
    assert judged(column, CALLS[name][column], *args, rules="how landlock") == errno.EPERM


@columns
def test_without_namespaces_other_requests_pass(column: int) -> None:
    assert judged(column, CALLS["ioctl"][column], 0, 0x5413, rules="how landlock") == ALLOWED
    assert judged(column, CALLS["ioctl"][column], 0, 0x40086602, rules="how landlock,accept attributes") == ALLOWED


CALL_BY_X32 = """
import ctypes
print(ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(0x40000000 | 39)), ctypes.get_errno())
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="x32 is a matter of x86_64")
async def test_the_kernel_refuses_x32_by_the_filter(commands: Commands, options: dict[str, object]) -> None:
    """Most kernels have no such calls and say so, which is no refusal of ours."""
    job = await commands.start(sys.executable, "-I", "-c", CALL_BY_X32, **options)
    await job.wait()

    assert printed(job) == f"-1 {errno.EPERM}\n"
