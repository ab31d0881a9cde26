"""On PYTHONPATH: a Mac, as far as Python code can tell. No /proc, /sys or /dev/shm, nothing in os that only Linux has, and spawn.

The libraries' compiled code still runs on Linux: this finds calls of the kit that a Mac lacks, not the Mac's own behaviour.
"""

import errno
import multiprocessing.util
import os
import select
import signal
import socket
import sys
import sysconfig
import time
import urllib.request  # noqa: F401

LINUX = {
    os: ("sched_", "SCHED_", "pidfd_", "PIDFD_", "P_PIDFD", "memfd_", "MFD_", "eventfd", "EFD_", "timerfd_", "TFD_", "posix_fa",
         "POSIX_FADV", "fdatasync", "O_TMPFILE", "O_PATH", "O_DIRECT", "O_NOATIME", "setns", "unshare", "CLONE_", "splice",
         "SPLICE_", "copy_file_range", "getrandom", "GRND_", "getresuid", "setresuid", "getresgid", "setresgid", "getxattr",
         "setxattr", "listxattr", "removexattr", "pipe2"),
    time: ("CLOCK_BOOTTIME", "CLOCK_TAI", "pthread_getcpuclockid"),
    signal: ("SIGRT", "SIGPWR", "SIGSTKFLT", "SIGPOLL", "SIGCLD", "sigtimedwait", "sigwaitinfo", "pidfd_send_signal"),
    select: ("epoll", "EPOLL"),
    socket: ("SO_BINDTODEVICE", "AF_NETLINK", "AF_PACKET", "SOCK_CLOEXEC", "SOCK_NONBLOCK", "TCP_USER_TIMEOUT"),
}  # fmt: skip
NOT_THERE = ("/proc", "/sys", "/dev/shm")
OF_PATHS = ("stat", "lstat", "readlink", "listdir", "scandir", "access")


def is_missing(path):
    """Return whether a Mac has no such path."""
    text = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
    return text.startswith(tuple(f"{folder}/" for folder in NOT_THERE)) or text in NOT_THERE


def refuse(event, arguments):
    """Raise FileNotFoundError for what a Mac does not have."""
    if event == "open" and is_missing(arguments[0]):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), arguments[0])


def without_linux(call):
    """Wrap a function of a path."""

    def called(path=".", *args, **kwargs):
        if is_missing(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return call(path, *args, **kwargs)

    return called


for module, prefixes in LINUX.items():
    for name in [name for name in dir(module) if name.startswith(prefixes)]:
        delattr(module, name)
for name in OF_PATHS:
    setattr(os, name, without_linux(getattr(os, name)))
sysconfig.get_config_vars()
sys.addaudithook(refuse)
multiprocessing.set_start_method("spawn")
sys.platform = "darwin"
