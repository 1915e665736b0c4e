"""Files that are there whole or not at all, and one process at a time."""

import errno
import glob
import json
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_IMODE, S_IRWXG, S_ISREG, S_IWUSR
from typing import Any, NamedTuple

SEPARATOR = f"[/{re.escape(os.sep)}]"
STARS = re.compile(rf"(|.*?{SEPARATOR})\*\*(?:{SEPARATOR}+(.*))?", re.DOTALL)  # a pattern: what is before and behind **
PARTIAL = ".partial"  # how the names of temporary files end
PIPE = "pipe or device"  # in place of an ending: what is never read of a folder, as it may never end
SHARED = 0o664  # of lock files: a cache may belong to several users
WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # what some network disks say to who asks for one
CLOCK_TICK = 0.02  # s; a file system's clock may stand still as long as this,
COARSE_TICK = 2.0  # s; or as long as this, where it keeps whole seconds (FAT: even ones)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, whose file takes its place once all is written and on the disk.

    Where anything fails, also by a kill, what was there before is still there. What a killed process left of a file of
    this name is removed: it has a lock of its own beside it, which nobody holds any more. Who might read the old file
    may read the new one, and nobody else.

    Raises:
        OSError: `path` is in no folder, or is one, or a device or pipe, which a file must not take the place of.
    """
    _refuse_other_than_file(path)
    remove_left(path)
    temporary = _new_temporary(path)
    lock = _lock_of(temporary)
    with locked(lock, wait=True):  # for whoever looks at this very moment whether somebody holds it
        try:
            if path.exists():
                temporary.touch()
            keep_mode(path, temporary, writable=True)  # before anything is in it
            yield temporary
            keep_mode(path, temporary, writable=True)  # whoever wrote it may have made it anew
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
            keep_mode(path, temporary)
            os.replace(temporary, path)
        except OSError as error:
            if error.errno is not None and error.filename is None:  # such as of a full disk, which says it of no file
                error.filename = str(path)
            raise
        finally:
            temporary.unlink(missing_ok=True)
            with suppress(OSError):  # on Windows it goes with the lock
                lock.unlink()


def keep_mode(path: Path, successor: Path, *, writable: bool = False) -> None:
    """Lets those who may read a file, and nobody else, read the one that is to take its place.

    On Windows the folder says who may. With `writable` we may write, as long as it is not finished.
    """
    if not hasattr(os, "chown") or not path.exists():
        return
    before = path.stat()
    mode = S_IMODE(before.st_mode) | (S_IWUSR if writable else 0)
    if before.st_gid != successor.stat().st_gid:
        try:
            os.chown(successor, -1, before.st_gid)
        except OSError:  # who is in no such group: then no group may
            mode &= ~S_IRWXG
    if mode != S_IMODE(successor.stat().st_mode):  # some disks have one mode for all, and refuse any other
        successor.chmod(mode)


def _new_temporary(path: Path) -> Path:
    """A name that nobody has: threads write at once, too."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")


def _lock_of(temporary: Path) -> Path:
    """The longest of all names that are needed to write a file."""
    return temporary.with_name(f"{temporary.name}.lock")


def _refuse_other_than_file(path: Path) -> None:
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "No such folder", str(path.parent))
    if is_no_file(path):
        kind = errno.EISDIR if path.is_dir() else errno.EINVAL
        raise OSError(kind, "Is a directory" if path.is_dir() else "Is a device or a pipe, and no file", str(path))


def remove_left(path: Path) -> None:
    """Removes temporary files for `path` whose locks are there, and held by nobody: their writers were killed."""
    for lock in path.parent.glob(f"{glob.escape(path.name)}.{8 * '[0-9a-f]'}{PARTIAL}.lock"):
        with suppress(OSError), locked(lock, wait=False):  # an error where it is held, or is no lock of ours
            lock.with_suffix("").unlink(missing_ok=True)


def obstacle(path: Path) -> str:
    """What keeps a file from being written there, as errors say it; nothing where it is new, or may be replaced.

    Whether files can be made in its folder is tried: with the longest name that writing it takes.
    """
    if os.path.isdir(path):  # which, unlike Path.is_dir, is False of names that cannot be
        return "it is a folder"
    if not os.path.isdir(path.parent):
        return f"there is no folder {path.parent}"
    if is_no_file(path):
        return "it is a device or a pipe"
    if os.path.islink(path):
        return f"it is a link to {os.readlink(path)}, which would stay as it is"
    return _obstacle_to_new_files(path)


def obstacle_in(folder: Path, names: Collection[str]) -> str:
    """The same for files of these names in a folder, which may not be there yet: then, where it is to be made."""
    try:
        os.lstat(folder)
    except ValueError:
        return "no folder can be called so"
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return "its name is too long"
    place = folder
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    if not os.path.isdir(place):
        return f"{place} is no folder"
    for name in names:
        if place == folder and is_no_file(folder / name):
            return f"{folder / name} is no file, and stands where one is to be written"
    return _obstacle_to_new_files(place / "new")


def _obstacle_to_new_files(path: Path) -> str:
    lock = _lock_of(_new_temporary(path))
    try:
        lock.touch(exist_ok=False)
    except ValueError:
        return "no file can be called so"
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            more = len(lock.name) - len(path.name)
            return f"its name is too long: it is begun under one with {more} letters more"
        return f"no file can be made in the folder {path.parent} ({error.strerror})"
    with suppress(OSError):  # another process took it for left, and removed it
        lock.unlink()
    return ""


def is_begun(name: str, wanted: str) -> bool:
    """Whether this is what a killed process leaves beside a file that it was writing, or the lock of that."""
    return re.fullmatch(rf"{re.escape(wanted)}\.[0-9a-f]{{8}}{re.escape(PARTIAL)}(\.lock)?", name) is not None


def beginning_of(path: Path, most: int) -> bytes:
    """The first bytes of a file; none of what is no file, or may not be read."""
    if path.is_file():
        with suppress(OSError), open(path, "rb") as file:
            return file.read(most)
    return b""


def is_no_file(path: Path | str) -> bool:
    """Whether something is there that is no file: whoever opens a pipe may wait for ever."""
    try:
        return not S_ISREG(os.stat(path).st_mode)  # one look: between two, a lock of another process may go
    except (OSError, ValueError):  # nothing is there, or nothing can be
        return False


def stat_of(path: Path) -> list[int]:
    """What changes when a file does, as `numbers_of`."""
    return numbers_of(path.stat())


def numbers_of(stat: os.stat_result) -> list[int]:
    """A file's size, its times, and which file it is."""
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def is_as_it_was(path: Path, before: os.stat_result) -> bool:
    """Whether a file that was settled then has been neither written to nor replaced since; it may have been linked."""
    try:
        now = path.stat()
    except OSError:
        return False
    is_alike = (now.st_size, now.st_mtime_ns, now.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)
    return is_alike and (now.st_ctime_ns == before.st_ctime_ns or now.st_nlink != before.st_nlink)


def settled_stat(path: Path) -> os.stat_result:
    """What a file is now, such that any later change shows: not before it is older than a tick of its clock.

    A second change within one tick would leave the times as they are.
    """
    stat = path.stat()
    tick = _tick_of(stat)
    age = time.time() - max(stat.st_mtime, stat.st_ctime)
    if age < tick:  # below 0 where the clock was set back: nobody knows how old the file is
        time.sleep(min(tick, tick - age))
    return path.stat()


def is_just_written(stat: os.stat_result) -> bool:
    """Whether a change of a file now might leave its times as they are."""
    return any(abs(time.time() - when) < _tick_of(stat) for when in (stat.st_mtime, stat.st_ctime))


def _tick_of(stat: os.stat_result) -> float:
    return COARSE_TICK if in_whole_seconds(stat) else CLOCK_TICK


def in_whole_seconds(stat: os.stat_result) -> bool:
    """Whether a file's times are, as on some disks, and in images of disks that are made to be the same each time."""
    return stat.st_mtime_ns % 10**9 == stat.st_ctime_ns % 10**9 == 0


def leads_nowhere(path: Path) -> bool:
    """Whether this is a link to what is not there, or to itself."""
    return os.path.islink(path) and not os.path.exists(path)


class Below(NamedTuple):
    """Something below a folder that is no folder itself."""

    path: str
    is_pipe: bool  # or a socket, or a device: whoever reads it may wait for ever


def files_below(folder: str, *, hidden: bool = True) -> Iterator[Below]:
    """What is below a folder, and below those that links in it lead to, as patterns with ** find it.

    Args:
        folder: Where to look.
        hidden: Whether that is among it whose name, or whose folder's name, begins with a dot.

    Raises:
        OSError: A folder cannot be looked into.
    """
    for each in folders_below(folder, hidden=hidden):
        with os.scandir(each) as entries:  # closed before anybody who asks for these files may stop asking
            files = [entry for entry in entries if not _is_folder(entry)]
            found = [Below(file.path, _is_pipe(file)) for file in files if hidden or not file.name.startswith(".")]
        yield from found


def by_ending(files: Iterable[Below], endings: Collection[str]) -> tuple[list[str], Counter[str]]:
    """The files whose names end so, in capitals or not; and of each other ending how many there are, if not hidden."""
    found, others = [], Counter[str]()
    for path, is_pipe in files:
        name = os.path.basename(path)
        ending = PIPE if is_pipe else os.path.splitext(name)[1].lower()
        if ending in endings:
            found.append(path)
        elif not name.startswith("."):
            others[ending] += 1
    return found, others


def folders_below(folder: str, *, hidden: bool = True) -> Iterator[str]:
    """A folder, and all that are below it, also by links, but for links back to where they are in.

    Args:
        folder: Where to begin; nothing is where the process is.
        hidden: Whether those whose names begin with a dot are among them.

    Raises:
        OSError: A folder cannot be looked into.
    """
    waiting: list[tuple[str, tuple[tuple[int, int], ...]]] = [(folder, ())]  # each with the numbers of those above it
    while waiting:
        path, above = waiting.pop()
        stat = os.stat(path or os.curdir)
        here = (stat.st_dev, stat.st_ino)
        if here in above:
            continue
        yield path
        with os.scandir(path or os.curdir) as entries:
            names = [entry.name for entry in entries if _is_folder(entry)]
        for name in reversed(names):
            if hidden or not name.startswith("."):
                waiting.append((os.path.join(path, name), (*above, here)))


def _is_pipe(entry: "os.DirEntry[str]") -> bool:
    """Whether this is there, and no file; a link that leads nowhere, or to itself, is an error for whoever reads it."""
    return not entry.is_file(follow_symlinks=False) and is_no_file(entry.path)


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    return entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and os.path.isdir(entry.path))


def matching(pattern: str) -> Iterator[str]:
    """What a pattern finds, as `glob.glob(pattern, recursive=True)`, which goes in circles where links do: ** does not.

    Raises:
        OSError: A folder cannot be looked into.
    """
    found = STARS.fullmatch(pattern)
    if found is None:
        yield from glob.iglob(pattern)
        return
    before, after = found.groups()
    for start in glob.iglob(before) if before else [""]:
        for folder in folders_below(start, hidden=False):
            yield from matching(os.path.join(glob.escape(folder), "*" if after is None else after))


def write_text(path: Path, text: str) -> None:
    """Replaces a text file, whole or not at all, in UTF-8 with the line ends as given."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replaces a JSON file, whole or not at all; of names that are no Unicode, the bytes are escaped."""
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    write_text(path, text.encode(errors="backslashreplace").decode())


@contextmanager
def locked(path: Path, *, wait: bool | float) -> Iterator[None]:
    """Holds the lock file `path`, which other processes that ask for it respect.

    Args:
        path: The lock file, in a folder that exists. It is gone afterwards where nobody waits for it: a process that
            waits for a file which is removed would lock something that a third one cannot see.
        wait: Whether to wait for another process that holds it, or for how many seconds at most.

    Raises:
        BlockingIOError: Another process holds it, and `wait` is False, or over.
        OSError: No file can be made there, or somebody's data is.
    """
    from filelock import FileLock, SoftFileLock, Timeout  # comes with huggingface-hub

    refuse_content(path)
    was_there = path.exists()
    lock: FileLock | SoftFileLock = FileLock(path, mode=SHARED)
    try:
        try:
            _acquire(lock, wait)
        except (NotImplementedError, OSError) as error:
            if isinstance(error, Timeout) or getattr(error, "errno", errno.ENOSYS) not in WITHOUT_LOCKS:
                raise
            if not was_there:  # what the first try left would count as somebody's
                path.unlink(missing_ok=True)
            lock = SoftFileLock(path, mode=SHARED)
            _acquire(lock, wait)
    except Timeout as error:
        raise BlockingIOError(f"another process holds {path}") from error
    try:
        yield
    finally:
        if not wait:
            with suppress(OSError):  # on Windows it goes with the lock
                path.unlink()
        with suppress(OSError):  # a lock that cannot be given back ends with the process
            lock.release()


def refuse_content(path: Path) -> None:
    """Makes sure that a file is no one's data: to lock it empties it.

    Ours are empty; or, where a disk has no locks, have a process, its host, and in later versions when it began.

    Raises:
        FileExistsError: It has something else in it, or is none.
    """
    if is_no_file(path):
        raise FileExistsError(errno.EEXIST, "Is no file, and no lock of vitlite's; move it away", str(path))
    with suppress(FileNotFoundError), open(path, "rb") as file:
        if not re.fullmatch(rb"(\d+\n[^\n]*\n?(\d[\d.]*\n?)?)?", file.read(300)):
            raise FileExistsError(errno.EEXIST, "Is no lock of vitlite's; move it away", str(path))


def _acquire(lock: Any, wait: bool | float) -> None:
    lock.acquire(timeout=-1 if wait is True else float(wait))
