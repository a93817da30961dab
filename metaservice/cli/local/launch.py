"""Become a program that dies with its starter: `launch.py PARENT UID GID COMMAND...` (UID and GID `-`: stay).

Runs as a file with `-I -S`, so that it is up in milliseconds and imports nothing of this project. It stands
between fork and exec because neither step may be done by the starter: a threaded process must not run Python
after its fork, and the kernel forgets the wish to die with the parent when the user changes.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Never returns: it becomes the command, or ends with status 127 and a reason."""
    parent, uid, gid, *command = sys.argv[1:]
    if uid != "-":
        os.setgroups([])
        os.setgid(int(gid))
        os.setuid(int(uid))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != int(parent):
        sys.exit(127)  # the starter died before it could be followed
    try:
        os.execv(command[0], command)  # noqa: S606 - no shell, and that is meant
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.exit(127)


main()
