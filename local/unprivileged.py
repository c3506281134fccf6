"""How root runs PostgreSQL, which refuses to run as root.

Root becomes another user in the child, between fork and exec, in one of two ways:

- It switches to uid 65534 ("nobody") and keeps one capability: to pass folders that belong to others. So neither the
  binaries nor the data move to a place that everyone can read. A container with its default profile allows it.
- Where there is no other user to switch to (root of a namespace that maps a single one), it enters a user namespace of
  its own, where it bears the number 65534, and keeps the rights over its files that it had.

An ordinary user needs none of this.
"""

import ctypes
import os
import sys
from pathlib import Path

NOBODY = 65534

# From linux/prctl.h, linux/securebits.h and linux/capability.h.
PR_SET_KEEPCAPS = 8
PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP = 28, 1 << 2
PR_CAP_AMBIENT, PR_CAP_AMBIENT_IS_SET, PR_CAP_AMBIENT_RAISE = 47, 1, 2
CAP_DAC_OVERRIDE = 1
LINUX_CAPABILITY_VERSION_3 = 0x20080522


def become(folder: Path) -> None:
    """Stop being root, as the owner of the folder and of all in it; nothing changes for an ordinary user.

    Raises OSError where the system allows neither way.
    """
    if os.geteuid() != 0:
        return
    if sys.platform != "linux":
        raise OSError("PostgreSQL refuses to run as root, and only Linux lets root step down: use an ordinary account")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_IS_SET, CAP_DAC_OVERRIDE, 0, 0) < 0 or not _switch_user(libc, folder):
        _enter_namespace(folder)


def _switch_user(libc: ctypes.CDLL, folder: Path) -> bool:
    try:
        _own(folder, NOBODY)
        libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
        # access(2), by which PostgreSQL makes sure of its own programs, would else leave the capability out of account.
        libc.prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP, 0, 0, 0)
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    except OSError:
        return False
    # Capabilities are a header and two words each of effective, permitted and inheritable ones. The ambient one is
    # what survives exec.
    header = (ctypes.c_uint32 * 2)(LINUX_CAPABILITY_VERSION_3, 0)
    one = 1 << CAP_DAC_OVERRIDE
    if libc.capset(header, (ctypes.c_uint32 * 6)(one, one, one, 0, 0, 0)) < 0:
        raise OSError(ctypes.get_errno(), "cannot keep the capability to pass folders that belong to others")
    if libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_DAC_OVERRIDE, 0, 0) < 0:
        raise OSError(ctypes.get_errno(), "cannot hand on the capability to pass folders that belong to others")
    return True


def _enter_namespace(folder: Path) -> None:
    user, group = os.geteuid(), os.getegid()
    _own(folder, user)
    os.unshare(os.CLONE_NEWUSER)
    # The kernel lets a process map its own group only after it has given up setgroups.
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{NOBODY} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{NOBODY} {group} 1")


def _own(folder: Path, user: int) -> None:
    if folder.stat().st_uid == user:
        return
    for parent, _, files in os.walk(folder):
        for path in (parent, *(os.path.join(parent, name) for name in files)):  # noqa: PTH118 - thousands of them
            os.lchown(path, user, -1)
