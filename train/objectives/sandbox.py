"""Confine this process to what changes nothing outside of it: for a child that tries a user's code.

A seccomp filter (see seccomp(2)) lets it write to one file descriptor alone, and refuses to open files for writing, to remove
or rename them, and to send; what it is refused fails with EPERM, also in C++ code. Memory that it shares with other
processes becomes read-only, and files that it shares with them are opened anew.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import resource
import stat
import struct
import sys
from pathlib import Path
from typing import Any

from muster import process

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
X86_64 = 0xC000003E
NUMBER, ARCH, ARGUMENTS = 0, 4, 16
"""Offsets in struct seccomp_data; an argument has 8 bytes, the lower four first."""
LOAD, EQUAL, ABOVE, ANY_BIT, RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
ALLOWED, REFUSED = 0x7FFF0000, 0x00050001  # SECCOMP_RET_ALLOW; SECCOMP_RET_ERRNO with EPERM
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
OPENS = {2: 1, 257: 2}
"""Numbers of open and openat, and the place of their flags."""
TO_A_DESCRIPTOR = (1, 18, 20, 296, 328)
"""write, pwrite64, writev, pwritev, pwritev2: to standard streams and one more descriptor."""
NEVER = (
    *(40, 42, 44, 46, 49, 275, 276, 278, 307, 326),  # sendfile, connect, sendto, sendmsg, bind, splice, tee, vmsplice, sendmmsg, copy_file_range
    *(57, 58, 59, 62, 101, 200, 234, 297, 322, 424),  # fork, vfork, execve, kill, ptrace, tkill, tgkill, rt_tgsigqueueinfo, execveat, pidfd_send_signal
    *(76, 77, 82, 83, 84, 85, 86, 87, 88, 133, 285),  # truncate, ftruncate, rename, mkdir, rmdir, creat, link, unlink, symlink, mknod, fallocate
    *(90, 91, 92, 93, 94, 132, 235, 260, 268, 280),  # chmod, fchmod, chown, fchown, lchown, utime, utimes, fchownat, fchmodat, utimensat
    *(258, 259, 263, 264, 265, 266, 316, 425, 437),  # mkdirat, mknodat, unlinkat, renameat, linkat, symlinkat, renameat2, io_uring_setup, openat2
)  # fmt: skip
PROCESSES = {"os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.system", "subprocess.Popen"}
"""Python's audit events of new processes: they would outlive this one."""


def confine(descriptor: int) -> None:
    """Let this process, from now on, write to standard streams and `descriptor` alone.

    Raises OSError: the system cannot (another processor than x86-64, or no seccomp).
    """
    if sys.platform != "linux" or platform.machine() != "x86_64" or not process.LIBC:
        raise OSError("no filter for this system")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # of a write into memory that is read-only
    _protect_shared_memory()
    _open_files_anew(but=descriptor)
    sys.addaudithook(_no_process)
    code = b"".join(struct.pack("<HBBI", *each) for each in _filter(descriptor))
    buffer = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog: the number of instructions, and where they are
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer)))
    for arguments in ((PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0)):
        if process.LIBC.prctl(*arguments):
            raise OSError("prctl(2) refuses a filter")


def _filter(descriptor: int) -> list[tuple[int, int, int, int]]:
    """Return the instructions of the filter: (code, jump if true, jump if false, value); see bpf(4)."""
    lines = [(LOAD, 0, 0, ARCH), (EQUAL, 1, 0, X86_64), (RETURN, 0, 0, REFUSED), (LOAD, 0, 0, NUMBER)]
    for number in NEVER:
        lines += [(EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSED)]
    for number, place in OPENS.items():
        rest = [
            (LOAD, 0, 0, ARGUMENTS + 8 * place),
            (ANY_BIT, 0, 1, WRITES),
            (RETURN, 0, 0, REFUSED),
            (RETURN, 0, 0, ALLOWED),
        ]
        lines += [(EQUAL, 0, len(rest), number), *rest]
    for number in TO_A_DESCRIPTOR:
        rest = [
            (LOAD, 0, 0, ARGUMENTS),
            (EQUAL, 2, 0, descriptor),
            (ABOVE, 0, 1, 2),
            (RETURN, 0, 0, REFUSED),
            (RETURN, 0, 0, ALLOWED),
        ]
        lines += [(EQUAL, 0, len(rest), number), *rest]
    return [*lines, (RETURN, 0, 0, ALLOWED)]


def _protect_shared_memory() -> None:
    """Make memory that is shared with other processes read-only: a write then ends this process."""
    assert process.LIBC
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        span, modes, *_ = line.split()
        if "w" in modes and modes.endswith("s"):
            start, end = (int(each, 16) for each in span.split("-"))
            process.LIBC.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.PROT_READ)


def _open_files_anew(*, but: int) -> None:
    """Reopen open files: the parent would read on from wherever this process leaves them. What is no file, directory or device becomes empty."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the listing's own is closed
            kind = os.fstat(descriptor).st_mode
            if descriptor in (but, nothing) or stat.S_ISCHR(kind) or stat.S_ISDIR(kind):
                continue
            again = nothing
            if stat.S_ISREG(kind):
                with contextlib.suppress(OSError):  # one that may only be written
                    again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
                    os.lseek(again, os.lseek(descriptor, 0, os.SEEK_CUR), os.SEEK_SET)
            os.dup2(again, descriptor, inheritable=False)
            if again != nothing:
                os.close(again)


def _no_process(event: str, _: Any) -> None:
    if event in PROCESSES:
        raise PermissionError(f"a confined process starts none: {event}")
