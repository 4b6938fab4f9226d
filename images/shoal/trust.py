"""The owner of a file: the one rule about files that other users of this machine may have written.

A file is trusted if this user or root owns it, and nobody else can change it or put another in its place. That holds
for every directory and link on the way to it. Directories that the user has named with `shoal trust` are trusted too.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

_GROUP_AND_ALL = stat.S_IWGRP | stat.S_IWOTH
_MOST_LINKS = 40
_named_by_root: set[str] = set()
"""The directories that root had named with `shoal trust` before this process became another user."""
_private_groups: dict[tuple[int, int], bool] = {}
"""Whether a user is alone in a group, as looked up before."""


def own_ids() -> set[int]:
    """Returns the users that own this user's files: this one, root, and for root under sudo, who called sudo."""
    found = {os.geteuid(), 0}
    caller = os.environ.get("SUDO_UID", "")
    return found | {int(caller)} if os.geteuid() == 0 and caller.isascii() and caller.isdecimal() else found


def become_owner(path: str | os.PathLike[str]) -> str:
    """As root, become the user that owns a file: with that user's groups, home and lists, and for good.

    Files that this process writes are that user's then, and a link that the user has put there leads to no file of
    others. Directories that root has named stay trusted. Changes the environment.

    Returns:
        The user in words; empty if nothing changed, because this process is not root's, or root owns the file.
    """
    status = os.stat(path)
    if os.geteuid() or not status.st_uid:
        return ""
    import pwd

    "x".encode("idna")  # a connection loads it, and the user may not be able to read Python's files
    try:
        entry = pwd.getpwuid(status.st_uid)
        home, group, groups = entry.pw_dir, entry.pw_gid, os.getgrouplist(entry.pw_name, entry.pw_gid)
    except KeyError:  # no entry
        home, group, groups = "/", status.st_gid, []
    _named_by_root.update(read_trusted())
    os.setgroups(groups)
    os.setgid(group)
    os.setuid(status.st_uid)
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "SUDO_UID"):
        os.environ.pop(name, None)
    os.environ["HOME"] = home
    return _name_user(status.st_uid)


def advise_trust(directory: str | os.PathLike[str]) -> str:
    """Returns the command that trusts a directory, with quotes: its name may be somebody else's, and have a command."""
    import shlex

    return f"shoal trust {shlex.quote(os.fspath(directory))}"


def find_stranger(path: str | os.PathLike[str]) -> str | None:
    """Describes who else can change a file or directory; None if it is trusted.

    Raises OSError if it does not exist.
    """
    return None if is_inside(path, read_trusted()) else _find_on_way(path)


def _find_on_way(path: str | os.PathLike[str]) -> str | None:
    """Describes who else can change a file or replace it; None: nobody."""
    last = os.path.realpath(path)
    for place, status in _walk_to(os.path.abspath(path)):
        # In a sticky directory such as /tmp, others can't replace a file that is not theirs.
        is_passed = place != last and stat.S_ISDIR(status.st_mode) and bool(status.st_mode & stat.S_ISVTX)
        if words := describe_stranger(place, status, is_passed=is_passed):
            return words
    return None


def describe_stranger(place: str, status: os.stat_result, *, is_passed: bool = False) -> str | None:
    """Describes which other user can change a file by its owner and mode; None: nobody.

    Args:
        place: The file. Directories above it are not looked at.
        status: Its status, of the link itself if it is one.
        is_passed: Whether it is a sticky directory, and only entries that others do not own matter.
    """
    if status.st_uid not in own_ids():
        return f"{place} belongs to {_name_user(status.st_uid)}"
    if stat.S_ISLNK(status.st_mode) or is_passed or not status.st_mode & _GROUP_AND_ALL:
        return None
    if status.st_mode & stat.S_IWOTH:
        return f"every user can write to {place}"
    if _has_access_list(place) or not _is_private_group(status.st_uid, status.st_gid):
        return f"the group {_name_group(status.st_gid)} can write to {place}"
    return None


def is_inside(path: str | os.PathLike[str], directories: set[str]) -> bool:
    """Returns whether a path is one of these directories, or in one of them, after all links are followed."""
    place = os.path.realpath(path)
    return any(place == each or place.startswith(each.rstrip("/") + "/") for each in directories)


def find_target_outside(path: str | os.PathLike[str]) -> str | None:
    """Returns where a path of the command line leads, if a link takes it out of the current project; None otherwise.

    The links of a project that was copied from elsewhere may lead to any file of this user. The project is taken to
    begin at the last directory that the path and the working directory share. Directories that the user has named with
    `shoal trust` may be linked to.
    """
    here = os.getcwd()
    top = os.path.commonpath([here, os.path.normpath(os.path.join(here, path))])
    target = os.path.realpath(path)
    return None if is_inside(target, {top}) or is_inside(target, read_trusted()) else target


def open_own(path: str | os.PathLike[str], flags: int, named: set[str] | None = None) -> int:
    """Opens a regular file of this user, and returns its descriptor. O_CREAT leaves it readable to its owner only.

    Raises OSError (EPERM) if it is a link, has further hard links, is not a regular file, or belongs to another user.

    Args:
        path: The file.
        flags: As for `os.open`. O_TRUNC would act before the look at the file.
        named: The directories in which other users' files are accepted; None: as named with `shoal trust`.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        status = os.fstat(descriptor)
        is_plain = stat.S_ISREG(status.st_mode) and status.st_nlink <= 1
        if is_plain and (status.st_uid in own_ids() or is_inside(path, read_trusted() if named is None else named)):
            if flags & os.O_CREAT and status.st_uid == os.geteuid():
                os.fchmod(descriptor, 0o600)
            return descriptor
        os.close(descriptor)
    except OSError as error:
        import errno

        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
    fix = f"remove it, or if it is yours: {advise_trust(os.path.realpath(os.path.dirname(path)))}"
    raise PermissionError(1, f"a link, a special file, or a file of another user. Fix: {fix}", os.fspath(path))


def _walk_to(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yields each directory and link on the way to an absolute path, and the file itself, with their status."""
    place, rest, links = "/", [each for each in reversed(path.split("/")) if each], 0
    yield place, os.lstat(place)
    while rest:
        name = rest.pop()
        if name == "..":
            place = os.path.dirname(place)
            continue
        here = os.path.join(place, name)
        status = os.lstat(here)
        yield here, status
        if not stat.S_ISLNK(status.st_mode):
            place = here
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(40, "Too many levels of symbolic links", path)
        target = os.readlink(here)
        place = "/" if target.startswith("/") else place
        rest += [each for each in reversed(target.split("/")) if each not in ("", ".")]


def _has_access_list(place: str) -> bool:
    """Returns whether a file has an access list. The mode of its group is then the one of others, too."""
    try:
        return "system.posix_acl_access" in os.listxattr(place, follow_symlinks=False)
    except OSError:  # a file system without them
        return False


def _is_private_group(user: int, group: int) -> bool:
    """Returns whether a user is the only one in a group, except root."""
    if (user, group) not in _private_groups:
        import grp
        import pwd

        try:
            owner, entry = pwd.getpwuid(user), grp.getgrgid(group)
            members = {*entry.gr_mem, *(each.pw_name for each in pwd.getpwall() if each.pw_gid == group)}
            # A directory service may list no users. Only a group with the user's name is then certainly the user's.
            is_own = owner.pw_gid == group and entry.gr_name == owner.pw_name
            _private_groups[user, group] = is_own and members <= {owner.pw_name, "root"}
        except KeyError:  # no entry: unknown members
            _private_groups[user, group] = False
    return _private_groups[user, group]


def _name_user(number: int) -> str:
    import pwd

    try:
        return f"the user {pwd.getpwuid(number).pw_name} ({number})"
    except KeyError:
        return f"the user {number}"


def _name_group(number: int) -> str:
    import grp

    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def trusted_file() -> str:
    """Returns the path of the list that `shoal trust` writes: one directory on each line."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(base):  # a relative one would name a file of the current project
        base = os.path.join(os.path.expanduser("~"), ".config")
    return os.path.join(base, "shoal", "trusted")


def read_trusted() -> set[str]:
    """Returns the directories that the user has named with `shoal trust`; none if others can write to the list."""
    path = trusted_file()
    try:
        if _find_on_way(path):
            return _named_by_root
        descriptor = open_own(path, os.O_RDONLY, set())
    except OSError:
        return _named_by_root
    with os.fdopen(descriptor, encoding="utf-8", errors="surrogateescape") as file:
        return _named_by_root | {line for line in file.read().split("\n") if line.startswith("/")}


def add_trusted(directory: str | os.PathLike[str]) -> str:
    """Adds a directory to the list, and returns the list's path. Raises OSError if it cannot be written."""
    place, path = os.path.realpath(directory), trusted_file()
    if place in read_trusted():
        return path
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    with os.fdopen(open_own(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a", errors="surrogateescape") as file:
        file.write(f"{place}\n")
    return path
