"""A sample store under way: its work folder, its journal, its lock, and the step to the path.

``<path>.partial/`` beside the path holds the files in ``store/``, the call that makes them in
``call.json``, finished tasks in ``journal.jsonl`` and a lock; while a store is replaced, the old
one is there too, in ``replaced/``. Nothing stands at the path itself before the store is complete;
then one rename puts it there. Behind a URL, where nothing can be renamed, the files are copied and
the manifest, without which they are no store, comes last; a finished task is an object of its own,
and the lock is one that its owner renews. The work folder outlives the step to the path, until all
parts of a call have made it. What goes into a zarr store of the user's grows in a
temporary folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import socket
import tempfile
import threading
import time
import uuid
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from ml4cube.core.errors import RunError, StoreError, StoreExistsError
from ml4cube.datasets.folders import (
    Files,
    Folder,
    LocalFolder,
    RemoteFolder,
    sync_path,
    write_file,
)
from ml4cube.datasets.places import Place, ZarrFolder, folder_of
from ml4cube.datasets.store import MANIFEST, read_manifest

logger = logging.getLogger(__name__)

_KEY = "ml4cube_draft"
# What the lock of a work folder holds: a folder is ours by that alone, so it is removed last.
_LOCK_MARK = b"work folder of an ml4cube sample store\n"
_OTHER_CALL = "%s was left by another call, or its cube or callback has changed; starting over"
_PUBLISHING = "publishing.json"
_PUBLISHED = "published.json"
# The owner of a remote lock renews it that often; one that was not for that long is dead.
_RENEW_S = 20.0
_DEAD_S = 90.0


def open_draft(target: Place, fingerprint: str) -> Draft:
    """Take hold of the store under way at a place; what is there stays until `Draft.begin`.

    Parameters
    ----------
    target : Path, str or ZarrFolder
        Where the store will stand: on disk, behind a URL, in a zarr store.
    fingerprint : str
        Hash of the call.

    Returns
    -------
    Draft
        A context manager.

    Raises
    ------
    StoreExistsError
        If the work folder exists and is none of ours.
    RunError
        If another run holds the work folder.
    """
    if isinstance(target, ZarrFolder):
        return ZarrDraft(target)
    if isinstance(target, Path):
        return LocalDraft(target, fingerprint)
    return RemoteDraft(target, fingerprint)


def work_place(target: Path | str) -> Path | str:
    """Return the work folder of a place.

    Parameters
    ----------
    target : Path or str
        Where a store will stand: on disk, behind a URL.

    Returns
    -------
    Path or str
        Beside it.
    """
    folder = f"{target}.partial"
    return Path(folder) if isinstance(target, Path) else folder


def put_back(target: Place) -> None:
    """Put a store back that a run, killed as it was to replace it, had moved into its work folder.

    Parameters
    ----------
    target : Path, str or ZarrFolder
        Where the store stood. Only on disk is anything moved.

    Raises
    ------
    StoreExistsError
        If the work folder is none of ours.
    """
    if isinstance(target, Path) and _moved_aside(target):
        # a run that holds the lock is just replacing it
        with contextlib.suppress(RunError), _lock_folder(target):
            _put_back(target)


def sweep(target: Place, fingerprint: str) -> None:
    """Remove the work folder of a store that stands.

    Parameters
    ----------
    target : Path, str or ZarrFolder
        Where the store stands.
    fingerprint : str
        Hash of the call that made it: a draft of another call stays.
    """
    if isinstance(target, ZarrFolder):
        return
    place = work_place(target)
    try:
        there = place.exists() if isinstance(place, Path) else bool(RemoteFolder(place).list())
        if there and _call_of(folder_of(place)) in (None, fingerprint):
            with open_draft(target, fingerprint) as draft:
                draft.discard()
    except Exception as error:  # of any kind: file systems raise what they like
        # it may be in use, none of ours, or nothing that this user may touch
        logger.debug("%s stays: %s", place, error)


def was_published(target: Place, fingerprint: str) -> bool:
    """Tell whether a run that was cut off later has put its store to a place.

    Parameters
    ----------
    target : Path, str or ZarrFolder
        Where a store stands.
    fingerprint : str
        Hash of the call of that run.

    Returns
    -------
    bool
        By the work folder: the store that stands may be another one by now.
    """
    if isinstance(target, ZarrFolder):
        return False
    place = work_place(target)
    if _call_of(folder_of(place)) != fingerprint:
        return False
    if isinstance(place, Path):
        return not (place / "store").exists()
    return RemoteFolder(place).size(_PUBLISHED) is not None


class Draft(ABC):
    """A store under way, held by one run at a time; a context manager.

    Attributes
    ----------
    target : Path, str or ZarrFolder
        Where the store will stand.
    root : Folder
        Where its files are until then.
    done : dict of int to Files
        What finished tasks wrote.
    """

    target: Place
    root: Folder
    done: dict[int, Files]

    @property
    def files(self) -> Files:
        """Everything that recorded tasks wrote."""
        return {name: entry for files in self.done.values() for name, entry in files.items()}

    def root_of_workers(self, elsewhere: bool) -> Folder:
        """Return the folder that workers write to: those of this machine need not wait for disks.

        Parameters
        ----------
        elsewhere : bool
            Whether they run on other machines.

        Returns
        -------
        Folder
            `root`, or one whose files are on disk only once they are recorded.
        """
        if elsewhere or not isinstance(self.root, LocalFolder):
            return self.root
        return replace(self.root, waits=False)

    @abstractmethod
    def begin(self, resume: bool = True) -> None:
        """Find out what is done; throw away what another call has left, or all unless `resume`."""

    @abstractmethod
    def record(self, task: int, files: Files) -> None:
        """Note durably that a task is finished, and what it wrote."""

    @abstractmethod
    def publish(self, overwrite: bool = False) -> None:
        """Put the finished store at its place; only if told to, in place of what stands there."""

    @abstractmethod
    def discard(self) -> None:
        """Remove the work folder and all that is in it, and give the lock back."""

    @abstractmethod
    def close(self) -> None:
        """Give the lock back; what is done stays, for the next run to resume."""

    def __enter__(self) -> Draft:
        """Hold the draft."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close; that this fails hides no error of the work, nor does it undo what is published."""
        try:
            self.close()
        except Exception as failure:  # of any kind: file systems raise what they like
            logger.warning("the work folder of %s is left as it is: %s", self.target, failure)


class LocalDraft(Draft):
    """A store under way on disk.

    Parameters
    ----------
    target : Path
        Where the store will stand.
    fingerprint : str
        Hash of the call.

    Raises
    ------
    StoreExistsError
        If the work folder exists and is none of ours.
    RunError
        If another run holds the work folder.
    """

    def __init__(self, target: Path, fingerprint: str) -> None:
        """Take the lock."""
        self.target: Path = target
        self.folder = Path(work_place(target))
        self.root: LocalFolder = LocalFolder(self.folder / "store")
        self.done = {}
        self._fingerprint = fingerprint
        with contextlib.ExitStack() as undo:
            self._lock = undo.enter_context(_lock_folder(target))
            self._journal = (self.folder / "journal.jsonl").open("ab")
            _put_back(target)
            undo.pop_all()

    def begin(self, resume: bool = True) -> None:
        """Read the journal, or start over.

        Parameters
        ----------
        resume : bool
            Whether to go on where a run of the same call stopped.
        """
        # what is still moved aside has been replaced
        shutil.rmtree(_aside(self.target), ignore_errors=True)
        found = _call_of(LocalFolder(self.folder))
        ours = found == self._fingerprint
        if resume and found is not None and not ours:
            logger.warning(_OTHER_CALL, self.folder)
        # without a store that grows, the last one was published
        if not (resume and ours and self.root.root.exists()):
            self._start_over()
        self._read_journal()

    def _start_over(self) -> None:
        (self.folder / "call.json").unlink(missing_ok=True)
        self._journal.truncate(0)
        self.root.clear()
        self.root.root.mkdir()
        write_file(self.folder / "call.json", json.dumps({_KEY: self._fingerprint}).encode())

    def _read_journal(self) -> None:
        """Believe every whole line whose files are there with their sizes."""
        path = self.folder / "journal.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        for number, line in enumerate(whole, 1):
            task, files = _journal_entry(line, f"{path}, line {number}")
            if all(self.root.size(name) == size for name, (size, _) in files.items()):
                self.done[task] = files
        # a line that a crash cut off would run into the next one
        self._journal.truncate(sum(map(len, whole)))

    def record(self, task: int, files: Files) -> None:
        """Note in the journal, durably, that a task is finished; before, wait for its files.

        Parameters
        ----------
        task : int
            Number of the task.
        files : dict
            What it wrote.
        """
        self.root.sync(files)
        self.done[task] = files
        self._journal.write((json.dumps({"task": task, "files": files}) + "\n").encode())
        self._journal.flush()
        os.fsync(self._journal.fileno())

    def publish(self, overwrite: bool = False) -> None:
        """Put the finished store at its path in one step.

        Parameters
        ----------
        overwrite : bool
            Whether to replace a store of ours that stands there.
        """
        if not overwrite:
            _check_free(self.target)
        elif self.target.exists():
            check_overwritable(self.target)
            self.target.rename(_aside(self.target))
        try:
            self.root.root.rename(self.target)
        except BaseException:
            _put_back(self.target)
            raise
        sync_path(self.target.parent)
        shutil.rmtree(_aside(self.target), ignore_errors=True)

    def discard(self) -> None:
        """Remove the work folder and all that is in it, the lock last: by that it is ours."""
        try:
            _put_back(self.target)
            with contextlib.suppress(OSError):
                # first: a call without a store counts as published
                (self.folder / "call.json").unlink(missing_ok=True)
                for folder in (self.root.root, _aside(self.target)):
                    shutil.rmtree(folder, ignore_errors=True)
                for path in sorted(self.folder.iterdir(), key=lambda path: path.name == "lock"):
                    path.unlink()
                self.folder.rmdir()
        finally:
            self._release()

    def close(self) -> None:
        """Give the lock back; a work folder in which no task is finished is removed.

        The kernel gives the lock back too if this process dies.
        """
        if self._lock.closed:
            return
        if os.fstat(self._journal.fileno()).st_size:
            self._release()
        else:
            self.discard()

    def _release(self) -> None:
        # a line that had no room is tried again, and is cut off when the journal is read
        with contextlib.suppress(OSError):
            self._journal.close()
        # a process that was forked meanwhile has the lock open, too
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        self._lock.close()


def _lock_folder(target: Path) -> IO[bytes]:
    """Lock a file in the work folder of a place; the kernel drops it when this process ends."""
    folder = Path(work_place(target))
    path = folder / "lock"
    _refuse_foreign(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as undo:
        lock = undo.enter_context(path.open("ab"))
        if not _takes(lock, path):
            raise RunError(
                f"another run is writing {target} (it holds {folder}); wait for it to end"
            )
        if not os.fstat(lock.fileno()).st_size:
            os.write(lock.fileno(), _LOCK_MARK)
            os.fsync(lock.fileno())
        undo.pop_all()
    return lock


def _takes(lock: IO[bytes], path: Path) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # the folder may have been published and removed between opening and locking
        return os.fstat(lock.fileno()).st_ino == path.stat().st_ino
    except OSError:
        return False


def _refuse_foreign(folder: Path) -> None:
    if not folder.exists():
        return
    lock = folder / "lock"
    # a run that was killed while it took the lock has left an empty one, and nothing else
    bare = folder.is_dir() and all(path == lock for path in folder.iterdir())
    mark = lock.read_bytes() if lock.is_file() else b""
    if mark != _LOCK_MARK and not (bare and not mark):
        raise StoreExistsError(
            f"{folder} is needed as work folder, but holds something else; move it away"
        )


def _aside(target: Path) -> Path:
    """Where a store is moved to until the one that replaces it is in its place."""
    return Path(work_place(target)) / "replaced"


def _moved_aside(target: Path) -> bool:
    """Whether a store was moved aside, and the one that replaces it not yet to its place."""
    there = _aside(target).exists() and Path(work_place(target), "store").exists()
    return there and not target.exists()


def _put_back(target: Path) -> None:
    if _moved_aside(target):
        _aside(target).rename(target)


def _call_of(folder: Folder) -> str | None:
    """Which call a work folder belongs to; None if that is not known."""
    try:
        found: str = json.loads(folder.read("call.json"))[_KEY]
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None
    return found


def _journal_entry(note: bytes, place: str) -> tuple[int, Files]:
    """Read what was noted of a finished task: its number, and what it wrote."""
    try:
        entry = json.loads(note)
        files = {str(n): (int(size), str(hash)) for n, (size, hash) in entry["files"].items()}
        return int(entry["task"]), files
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(
            f"{place} is damaged ({type(error).__name__}: {error}), so what is finished is not "
            "known; run again with resume=False to start over"
        ) from error


class RemoteDraft(Draft):
    """A store under way behind a URL.

    Parameters
    ----------
    target : str
        Where the store will stand.
    fingerprint : str
        Hash of the call.

    Raises
    ------
    StoreExistsError
        If the work folder exists and is none of ours.
    RunError
        If another run holds the work folder.
    """

    def __init__(self, target: str, fingerprint: str) -> None:
        """Take the lock."""
        self.target: str = target
        self.folder = RemoteFolder(str(work_place(target)))
        # names that no other call has: a run that slept while another took over may still write
        self.root: RemoteFolder = RemoteFolder(f"{self.folder}/store-{fingerprint[:12]}")
        self._journal = f"journal-{fingerprint[:12]}"
        self.done = {}
        self._fingerprint = fingerprint
        self._me = uuid.uuid4().hex
        self._ended = threading.Event()
        # not all file systems put an object in one step
        self._lock_use = threading.RLock()
        self._take_lock()
        self._renewer = threading.Thread(target=self._renew, daemon=True, name="ml4cube-lock")
        self._renewer.start()

    def begin(self, resume: bool = True) -> None:
        """Read the journal, or start over.

        Parameters
        ----------
        resume : bool
            Whether to go on where a run of the same call stopped.
        """
        found = _call_of(self.folder)
        if not resume or found != self._fingerprint:
            if resume and found:
                logger.warning(_OTHER_CALL, self.folder)
            self._start_over()
        self._read_journal()

    def _take_lock(self) -> None:
        ours = _KEY in self._read_lock() or _call_of(self.folder) is not None
        if not ours and self.folder.list():
            raise StoreExistsError(
                f"{self.folder} is needed as work folder, but holds something else; move it away"
            )
        if not self.folder.create("lock.json", self._lock_note()):
            owner = self._read_lock()
            if time.time() - owner.get("time", 0.0) < _DEAD_S:
                raise RunError(
                    f"another run is writing {self.target} (on {owner.get('host')}, it holds "
                    f"{self.folder}); wait for it to end, or {_DEAD_S:.0f} s if it was killed"
                )
            self.folder.write("lock.json", self._lock_note())
        if not self._is_mine():
            raise RunError(f"another run has just begun to write {self.target}; wait for it to end")

    def _lock_note(self) -> bytes:
        note = {_KEY: self._me, "host": socket.gethostname(), "time": time.time()}
        return json.dumps(note).encode()

    def _read_lock(self) -> dict[str, Any]:
        try:
            found: Any = json.loads(self.folder.read("lock.json"))
        except (FileNotFoundError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _renew(self) -> None:
        while not self._ended.wait(_RENEW_S):
            try:
                with self._lock_use:
                    if not self._is_mine():
                        return
                    self.folder.write("lock.json", self._lock_note())
            except Exception as error:  # of any kind: file systems raise what they like
                logger.warning(
                    "the lock of %s is not renewed, trying again: %s", self.folder, error
                )

    def _is_mine(self) -> bool:
        with self._lock_use:
            return self._read_lock().get(_KEY) == self._me

    def _check_mine(self) -> None:
        if not self._is_mine():
            raise RunError(
                f"another run took over {self.target}, since this one had not renewed its lock for "
                f"{_DEAD_S:.0f} s; wait for it to end, then run again"
            )

    def _start_over(self) -> None:
        # ours all the time, and no call's until all is gone
        self.folder.write("call.json", json.dumps({_KEY: ""}).encode())
        for name in self.folder.list():
            if name not in ("lock.json", "call.json", _PUBLISHING):
                self.folder.remove(name)
        self.folder.write("call.json", json.dumps({_KEY: self._fingerprint}).encode())

    def _read_journal(self) -> None:
        """Believe every entry whose files are there with their sizes."""
        there = self.root.list()
        for name in sorted(n for n in self.folder.list() if n.startswith(f"{self._journal}/")):
            task, files = _journal_entry(self.folder.read(name), f"{self.folder}/{name}")
            if all(there.get(path) == size for path, (size, _) in files.items()):
                self.done[task] = files

    def record(self, task: int, files: Files) -> None:
        """Note that a task is finished, in an object of its own.

        Parameters
        ----------
        task : int
            Number of the task.
        files : dict
            What it wrote.
        """
        self._check_mine()
        self.done[task] = files
        note = json.dumps({"task": task, "files": files}).encode()
        self.folder.write(f"{self._journal}/{task}.json", note)

    def publish(self, overwrite: bool = False) -> None:
        """Copy the finished store to its place, the manifest last.

        Parameters
        ----------
        overwrite : bool
            Whether to replace a store of ours that stands there.
        """
        self._check_mine()
        if not overwrite:
            _check_free(self.target)
        place = RemoteFolder(self.target)
        ours = _ours_at(place, self._noted()) | set(self.root.list())
        self.folder.write(_PUBLISHING, json.dumps(sorted(ours)).encode())
        place.remove(MANIFEST)  # from here on what was there is no store any more
        place.clear()
        names = sorted(self.root.list(), key=lambda name: (name == MANIFEST, name == "zarr.json"))
        place.take(self.root, names[:-2])
        for name in names[-2:]:
            place.take(self.root, [name])
        self.folder.write(_PUBLISHED, b"{}")

    def _noted(self) -> set[str]:
        """What a copying that was cut off has noted that it would remove and put."""
        cut_off = self.folder.size(_PUBLISHING) is not None
        return set(json.loads(self.folder.read(_PUBLISHING))) if cut_off else set()

    def discard(self) -> None:
        """Remove the work folder and all that is in it, what tells that it is ours last."""
        self._end()
        if not self._is_mine():
            return
        there = {name.partition("/")[0] for name in self.folder.list()}
        for name in sorted(there - {"lock.json", "call.json"}):
            RemoteFolder(f"{self.folder}/{name}").clear()
        self.folder.clear()

    def close(self) -> None:
        """Give the lock back; a work folder in which no task is finished is removed."""
        if self._ended.is_set():
            return
        self._end()
        # what was copied already is known as ours by the note of it alone
        if not any(name.startswith(("journal-", _PUBLISHING)) for name in self.folder.list()):
            self.discard()
        elif self._is_mine():
            self.folder.remove("lock.json")

    def _end(self) -> None:
        """Stop renewing the lock; it would be there again after it was given back."""
        self._ended.set()
        self._renewer.join()


def _ours_at(place: RemoteFolder | ZarrFolder, noted: set[str]) -> set[str]:
    """Names at a place that may be replaced, by what was noted; refuse if there are others."""
    there = set(place.list())
    if MANIFEST in there and not noted:
        check_overwritable(place.url if isinstance(place, RemoteFolder) else place)
        return there
    if foreign := sorted(there - noted):
        raise StoreExistsError(
            f"{place} holds {len(foreign)} files that are none of the sampler's, such as "
            f"{foreign[0]!r}, so nothing is written there; move it away, then run again"
        )
    return noted


class ZarrDraft(Draft):
    """A store under way that will go into a zarr store of the user's, such as an Icechunk session.

    Workers write files to a temporary folder of this machine, and this process puts them into the
    zarr store when all are there. So nothing is resumed; what a stopped run had done is gone.

    Parameters
    ----------
    target : ZarrFolder
        Where the store will stand.
    """

    def __init__(self, target: ZarrFolder) -> None:
        """Make the temporary folder."""
        self.target: ZarrFolder = target
        self._temporary = tempfile.TemporaryDirectory(prefix="ml4cube-")
        self.root: LocalFolder = LocalFolder(Path(self._temporary.name, "store"))
        self.done = {}

    def begin(self, resume: bool = True) -> None:
        """Do nothing: nothing is done.

        Parameters
        ----------
        resume : bool
            Not used.
        """

    def record(self, task: int, files: Files) -> None:
        """Note that a task is finished.

        Parameters
        ----------
        task : int
            Number of the task.
        files : dict
            What it wrote.
        """
        self.done[task] = files

    def publish(self, overwrite: bool = False) -> None:
        """Put the finished store at its place: arrays before their chunks, its group last.

        Until then a group is there that notes what is ours, for a run after one that was cut off.

        Parameters
        ----------
        overwrite : bool
            Whether to replace a store of ours that stands there.
        """
        if not overwrite:
            _check_free(self.target)
        names = self.root.list()
        there = _ours_at(self.target, _noted_in(self.target))
        self._make_groups_above()
        if self.target.store.supports_deletes:  # a zip file keeps both notes, or is lost as a whole
            self._write_group(self.target, {_KEY: sorted(there | set(names))})
        for child in sorted({name.partition("/")[0] for name in there} - {"zarr.json"}):
            self.target.remove(child)
        arrays_first = sorted(names, key=lambda name: not name.endswith("zarr.json"))
        for name in sorted(arrays_first, key=lambda name: name == "zarr.json"):
            self.target.write(name, self.root.read(name))

    def _make_groups_above(self) -> None:
        """Make the groups on the way to the store, without which readers do not find it."""
        for above in self.target.way()[:-1]:
            if above.size("zarr.json") is None:
                self._write_group(above, {})

    @staticmethod
    def _write_group(folder: ZarrFolder, attributes: dict[str, Any]) -> None:
        group = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
        folder.write("zarr.json", json.dumps(group).encode())

    def discard(self) -> None:
        """Remove the temporary folder."""
        self._temporary.cleanup()

    def close(self) -> None:
        """Remove the temporary folder."""
        self._temporary.cleanup()


def _noted_in(target: ZarrFolder) -> set[str]:
    """What a run that was cut off has noted in a zarr store of the user's that is ours."""
    try:
        return set(json.loads(target.read("zarr.json"))["attributes"][_KEY])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return set()


def is_taken(target: Place) -> bool:
    """Tell whether anything stands at a place.

    Parameters
    ----------
    target : Path, str or ZarrFolder
        Where a store will stand.

    Returns
    -------
    bool
        True for links that lead nowhere, too; false for a store of ours whose copying to its
        place was cut off, since its draft will do it again.
    """
    if isinstance(target, Path):
        return target.exists() or target.is_symlink()
    if isinstance(target, ZarrFolder):
        return bool(target.list()) and not _noted_in(target)
    cut_off = folder_of(work_place(target)).size(_PUBLISHING) is not None
    place = RemoteFolder(target)
    return bool(place.list()) and not (cut_off and place.size(MANIFEST) is None)


def _check_free(target: Place) -> None:
    """Refuse to replace what came to a place after the run had begun."""
    if is_taken(target):
        raise StoreExistsError(
            f"{target} was not there when this run began, and is there now, so it is not replaced; "
            "move it away, then run again"
        )


def check_overwritable(target: Place) -> None:
    """Refuse to replace anything but a store of ours.

    Parameters
    ----------
    target : Path, str or ZarrFolder
        What would be replaced.

    Raises
    ------
    StoreExistsError
        If it is something else.
    """
    folder = folder_of(target)
    try:
        known = read_manifest(target)
        attributes: Any = json.loads(folder.read("zarr.json"))["attributes"]
        ours = "ml4cube_format" in attributes
    except (StoreError, OSError, ValueError, KeyError, TypeError):
        known, ours = {}, False
    if not ours:
        raise StoreExistsError(
            f"{target} exists and is no sample store of ours, so it is never overwritten; "
            "move it away or choose another path"
        )
    if foreign := sorted(set(folder.list()) - set(known) - {MANIFEST}):
        raise StoreExistsError(
            f"{target} holds {len(foreign)} files that are none of the sampler's, such as "
            f"{foreign[0]!r}, so it is not overwritten; move it away first"
        )
