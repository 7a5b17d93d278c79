"""Processes: folders of one user and of one process, children that end with their parent, limits.

A folder is private if this user alone can change it and no other user can put another one in its place. That holds for
as long as the users who own it and the folders above it want it to, so it is looked at once and then relied on.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import grp
import logging
import os
import pwd
import re
import resource
import shutil
import signal
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Final

from omni_discovery.errors import ConfigError

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG: Final = 1
#: The fewest open files to start with. An idle replica has two dozen and two more for each hub, besides those of its
#: engine and hand-offs; a hub has as many, and some for each replica and each client.
LEAST_FILES: Final = 256
_OWN_FOLDER: Final = "set XDG_RUNTIME_DIR to a folder of your own"
#: Where an owned folder is made if not in the temporary one: its path may be too long for a socket.
_OTHER_PLACES: Final = ("/tmp", "/var/tmp")  # noqa: S108  (what is made there is private)
#: Other paths would have to be quoted where they are part of an address, differently for each client.
_PLAIN_PATH: Final = re.compile(r"[A-Za-z0-9/._+@-]+")
#: The file in an owned folder that its owner has locked.
_OWNER: Final = "owner"
_UNLOCKED: Final = "owner.new"
#: How long one call looks for what ended processes have left: a start waits for it.
_LOOK_S: Final = 3.0
#: What the machine, or this process, may have again in a moment: open files, memory, room on the disk.
_SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT})
#: No folder: only root could make it.
_NOWHERE: Final = "/nonexistent"
#: Folders that others may write to by their modes, where the operator says that nobody else is.
_vouched_for: set[Path] = set()


def reads_own_files(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables with which a process, and what it starts, loads nothing from folders that others can write to.

    From the current folder Python would import modules, and programs load libraries where ``LD_LIBRARY_PATH`` has an
    empty element: OpenCV makes one of an empty variable. GnuTLS, as PyAV brings it, looks for settings in
    ``/tmp/vendor``, and would wait for ever for what writes into a pipe there.
    """
    libraries = re.split("[:;]", environment.get("LD_LIBRARY_PATH", ""))
    return {
        "PYTHONSAFEPATH": "1",
        "LD_LIBRARY_PATH": ":".join(each for each in libraries if each.startswith(("/", "$"))) or _NOWHERE,
        "GNUTLS_SYSTEM_PRIORITY_FILE": environment.get("GNUTLS_SYSTEM_PRIORITY_FILE") or os.devnull,
    }


def trust_folders(listed: str) -> None:
    """Take folders, with colons between them, as closed to others whatever their modes are; for the whole process.

    A container's volume may be open to everybody, and yet have one user alone. Raise ConfigError for a relative path.
    """
    folders = [Path(each) for each in listed.split(":") if each]
    for each in folders:
        if not each.is_absolute():
            raise ConfigError(f"OMNI_TRUSTED_FOLDERS: {each} is no path from the root")
    _vouched_for.update(Path(os.path.realpath(each)) for each in folders)


def runtime_dir(xdg_runtime_dir: str | None) -> Path:
    """The per-user folder: under XDG_RUNTIME_DIR where the system has one, else under the temporary folder."""
    return Path(xdg_runtime_dir or Path(tempfile.gettempdir()) / f"omni-{os.getuid()}") / "omni"


def is_private(folder: Path) -> bool:
    """Whether ``folder`` is there and private: in the temporary folder, others may be first."""
    try:
        os.close(open_private(folder))
    except (OSError, ConfigError):
        return False
    return True


def make_private(folder: Path) -> None:
    """Make a private folder, where it is missing. Raise ConfigError that names the folder to correct, or OSError."""
    os.close(open_private(folder, make=True))


def open_private(folder: Path, *, make: bool = False) -> int:
    """Return a descriptor of a private folder; with ``make``, make it and what is missing above it, of mode 0700.

    Raise ConfigError that names the folder to correct if it is not private, FileNotFoundError if there is none.
    """
    # Links above the folder are the system's (such as /var/run) or this user's own; the folder itself is never one.
    whole = Path(os.path.realpath(_check_links(folder).parent)) / folder.name
    opened, trusted = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC), _trusted_owners()
    try:
        path = Path("/")
        for name in whole.parts[1:]:
            _check_above(os.fstat(opened), path, trusted)
            path /= name
            child = _open_child(opened, path, make=make, is_last=path == whole)
            os.close(opened)
            opened = child
        _check_private(os.fstat(opened), whole)
    except BaseException:
        os.close(opened)
        raise
    return opened


def check_parents(folder: Path) -> None:
    """Raise ConfigError if another user could put another folder in the place of one that is made in ``folder``."""
    path, trusted = Path(os.path.realpath(folder)), _trusted_owners()
    for each in (*reversed(path.parents), path):
        _check_above(each.stat(), each, trusted)


def check_unshared(folder: Path) -> None:
    """Raise ConfigError if another user could put a file into ``folder``, or another folder in its place.

    The group that many systems make for each user may write there, as long as nobody else is in it.
    """
    for name in (lexical := _check_links(folder.absolute() / "name", "")).parents:
        if name.is_symlink():
            _check_others(name.parent, may_add=True)
    _check_others(lexical.parent, may_add=False)


def is_unshared(folder: Path) -> bool:
    """Whether ``check_unshared`` finds nothing; False for a folder that can't be looked at."""
    try:
        check_unshared(folder)
    except (OSError, ConfigError):
        return False
    return True


def _check_others(folder: Path, *, may_add: bool) -> None:
    """Raise ConfigError if others could change ``folder``, by more than something of their own where they may add."""
    path, trusted = Path(os.path.realpath(folder)), _trusted_owners()
    for each in (*reversed(path.parents), path):
        status = each.stat()
        if status.st_uid not in trusted:
            raise ConfigError(f"{each} belongs to {_user(status.st_uid)}")
        # What lies in such a folder can be replaced by its owner alone, but anybody can add to it.
        is_guarded = each in _vouched_for or ((may_add or each != path) and status.st_mode & stat.S_ISVTX)
        if not is_guarded and (status.st_mode & 0o002 or (status.st_mode & 0o020 and not _is_own_group(status.st_gid))):
            raise ConfigError(f"others can write to {each}")


class OwnedFolder:
    """A private folder with a name that nobody can foresee, made in the temporary folder, for one process.

    The owner holds a lock in it, and so do the forks of the owner: the kernel releases it however they end.
    """

    def __init__(self, prefix: str, socket_name: str) -> None:
        """Make it. A socket of that name can be bound in it.

        Raise ConfigError with all that is in the way, OSError if that includes a shortage, which may pass.
        """
        failures: list[OSError | ConfigError] = []
        for place in _places():
            try:
                self.path, self._lock = _make_owned(place, prefix, socket_name)
                return
            except (OSError, ConfigError) as error:
                failures.append(error)
        text = "; ".join(map(str, failures))
        if any(_is_shortage(error) for error in failures):
            raise OSError(text)
        raise ConfigError(text)

    def remove(self) -> None:
        """Remove it with all that is in it. Idempotent."""
        _remove_owned(self.path)
        self._lock.close()


def remove_orphaned(prefix: str, clock: Callable[[], float] = time.monotonic) -> bool:
    """Remove the owned folders of this user whose owners have ended without doing so, as far as a few seconds go.

    Return whether all are gone that could be found. False is worth another call: no file could be opened, or the time
    was over, for two. ``clock`` returns monotonic seconds.
    """
    is_done, until_s = True, clock() + _LOOK_S
    for place in _places():
        try:
            for folder in _of_this_user(place, prefix):
                if clock() >= until_s:
                    raise TimeoutError(errno.ETIMEDOUT, f"not all of {place} was looked at within {_LOOK_S:g} s")
                is_done &= folder is None or _remove_orphan(folder)
        except OSError as error:
            if _is_shortage(error) or isinstance(error, TimeoutError):
                logger.warning("folders.left prefix=%s: %s: what ended processes left there stays", prefix, error)
                is_done = False
    return is_done


def _of_this_user(place: str, prefix: str) -> Iterator[Path | None]:
    """The folders there with the name and the owner of one that is owned; None for each of the others."""
    with os.scandir(place) as scan:
        entries = list(scan)
    for entry in entries:
        # Whoever may write there can make any number with such names, so the owner is asked for before all else.
        is_named = entry.name.startswith(f"{prefix}{os.getuid()}-")
        yield Path(entry.path) if is_named and _is_of_this_user(entry) else None


def _is_of_this_user(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.stat(follow_symlinks=False).st_uid == os.getuid()
    except FileNotFoundError:
        return False


def _remove_orphan(folder: Path) -> bool:
    """Return whether nothing is left to do. Raise OSError for a shortage."""
    try:
        # Another user may have made one with such a name, and a pipe in it.
        os.close(open_private(folder))
        with (folder / _OWNER).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return _remove_owned(folder)
    except ConfigError:
        return True
    except OSError as error:
        if _is_shortage(error):
            raise
        # It has an owner, or is gone.
        return True


def _remove_owned(folder: Path) -> bool:
    """Return whether it is gone. Its lock goes last: without one, nobody would take the rest for an orphan's."""
    with contextlib.suppress(OSError):
        for path in list(folder.iterdir()):
            if path.name != _OWNER:
                _remove(path)
        if list(folder.iterdir()) == [folder / _OWNER]:
            (folder / _OWNER).unlink()
            folder.rmdir()
    return not folder.exists()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _is_shortage(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in _SHORTAGES


def _places() -> list[str]:
    # To find the temporary folder, a file is made in it, which may fail.
    with contextlib.suppress(FileNotFoundError):
        return list(dict.fromkeys((tempfile.gettempdir(), *_OTHER_PLACES)))
    return list(_OTHER_PLACES)


def _make_owned(place: str, prefix: str, socket_name: str) -> tuple[Path, IO[bytes]]:
    if not _PLAIN_PATH.fullmatch(place):
        raise ConfigError(f"{place} has characters that the address of a socket may not have")
    check_parents(Path(place))
    folder = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getuid()}-", dir=place))
    try:
        _check_socket(folder / socket_name)
        return folder, _lock_folder(folder)
    except BaseException:
        # This needs no descriptor: there may be none left.
        with contextlib.suppress(OSError):
            (folder / _UNLOCKED).unlink(missing_ok=True)
            folder.rmdir()
        raise


def _check_socket(path: Path) -> None:
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(str(path))
    except OSError as error:
        if _is_shortage(error):
            raise
        raise ConfigError(f"no socket can be made in {path.parent.parent}: {error}") from error
    path.unlink()


def _lock_folder(folder: Path) -> IO[bytes]:
    unnamed = folder / _UNLOCKED
    lock = unnamed.open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX)
    # Named only once it is locked: another start, which looks for orphans, must not find it free.
    unnamed.rename(folder / _OWNER)
    return lock


def _is_own_group(gid: int) -> bool:
    try:
        user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _check_links(folder: Path, advice: str = f": {_OWN_FOLDER}") -> Path:
    """``folder``, absolute. Raise ConfigError if a link on the way to it was made by another user."""
    folder, trusted = folder.absolute(), _trusted_owners()
    for path in reversed(folder.parents):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if stat.S_ISLNK(status.st_mode) and status.st_uid not in trusted:
                raise ConfigError(f"{path} is a link made by {_user(status.st_uid)}{advice}")
    return folder


def _open_child(parent: int, path: Path, *, make: bool, is_last: bool) -> int:
    if make:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path.name, 0o700, dir_fd=parent)
    # To go through a folder, nobody needs to be allowed to list it.
    kind = os.O_RDONLY if is_last else os.O_PATH
    try:
        return os.open(path.name, kind | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    except NotADirectoryError as error:
        raise ConfigError(f"{path} is a link or no folder: remove it, or {_OWN_FOLDER}") from error
    except PermissionError as error:
        owner = os.stat(path.name, dir_fd=parent, follow_symlinks=False).st_uid
        raise ConfigError(f"{path}, of {_user(owner)}, can't be entered: {_OWN_FOLDER}") from error


def _check_above(status: os.stat_result, path: Path, trusted: frozenset[int]) -> None:
    if status.st_uid not in trusted:
        raise ConfigError(f"{path} belongs to {_user(status.st_uid)}, who could swap what is in it: {_OWN_FOLDER}")
    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX and path not in _vouched_for:
        raise ConfigError(f"others can write to {path}, and swap what is in it: {_OWN_FOLDER}")


def _check_private(status: os.stat_result, path: Path) -> None:
    if status.st_uid != os.getuid():
        raise ConfigError(f"{path} belongs to {_user(status.st_uid)}: {_OWN_FOLDER}")
    if status.st_mode & 0o022:
        raise ConfigError(f"others can write to {path}: remove it, or {_OWN_FOLDER}")


def _trusted_owners() -> frozenset[int]:
    """The users who may own the folders above a private one: root and this user.

    Where a container shows the host's folders without showing its users, the kernel gives those to one stand-in; it is
    trusted if nobody in the container can be it.
    """
    trusted = {0, os.getuid()}
    with contextlib.suppress(OSError, ValueError):
        stand_in = int(Path("/proc/sys/kernel/overflowuid").read_text())
        rows = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
        if rows and not any(first <= stand_in < first + count for first, _, count in rows):
            trusted.add(stand_in)
    return frozenset(trusted)


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name!r}"
    except KeyError:
        return f"user {uid}"


def write_private(path: Path, content: bytes) -> None:
    """Replace a file atomically, readable by its owner only. Raise OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(number, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def die_with_parent(parent_pid: int, number: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send this process a signal when its parent ends, however it ends.

    ``parent_pid`` is the process that started this one: if it is gone already, this process exits at once. Call it
    first thing.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit(0)


def process_mark(pid: int) -> str:
    """What no other process has: boot, process id namespace, id and start; empty if it has ended or is not known."""
    try:
        if int(str(Path("/proc/self").readlink())) != os.getpid():
            # It shows the processes of another namespace, under other ids.
            return ""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = Path("/proc/self/ns/pid").stat().st_ino
        # The name in parentheses may hold spaces; the fields after it do not.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else f"{boot}/{namespace}/{pid}/{fields[19]}"


def has_ended(pid: int) -> bool:
    """Whether a child of this process has ended. The child is not reaped by this."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def end_group(pid: int) -> None:
    """Kill the process group that ``pid`` leads, or led and is not reaped yet. A group that is gone is no error."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def raise_descriptor_limit(program: str) -> int:
    """Raise the soft limit of open files to the hard limit, and return it. Raise ConfigError if that is too low.

    ``program`` names this process in the error, such as ``a hub``.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < LEAST_FILES:
        raise ConfigError(
            f"only {hard} files may be open here, and {program} needs {LEAST_FILES} at least; raise the hard limit: "
            "'ulimit -Hn 65536' as root, or LimitNOFILE= of the systemd unit"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard
