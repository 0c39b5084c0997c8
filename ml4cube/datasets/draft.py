"""A sample store under way: its work folder, its journal, its lock, and the step to the path.

``<path>.partial/`` beside the path holds the files in ``store/``, the call that makes them in
``call.json``, finished tasks in ``journal.jsonl`` and a lock. Nothing stands at the path itself
before the store is complete; then one rename puts it there.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from ml4cube.core.errors import RunError, StoreError, StoreExistsError
from ml4cube.datasets.store import Files, read_manifest, sync_folder, write_file

_KEY = "ml4cube_draft"


class StoreDraft:
    """A store under way, held by one run at a time; a context manager.

    Parameters
    ----------
    target : Path
        Where the store will stand.
    fingerprint : str
        Hash of the call: a draft of another call is thrown away, one of the same is resumed.
    resume : bool
        Whether to resume at all.

    Raises
    ------
    StoreExistsError
        If the work folder exists and is none of ours.
    RunError
        If another run holds the work folder.
    """

    def __init__(self, target: Path, fingerprint: str, resume: bool = True) -> None:
        """Take the lock and read the journal."""
        self.target = target
        self.folder = target.with_name(f"{target.name}.partial")
        self.root = self.folder / "store"
        self.done: dict[int, Files] = {}
        self._lock = self._take_lock()
        try:
            if not resume or self._read_call() != fingerprint:
                self._start_over(fingerprint)
            self._read_journal()
            self._journal = (self.folder / "journal.jsonl").open("a", encoding="utf-8")
        except BaseException:
            self._lock.close()
            raise

    def _take_lock(self) -> IO[bytes]:
        """Lock a file in the work folder; the kernel drops the lock when this process ends."""
        self._refuse_foreign()
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "lock"
        lock = path.open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # the folder may have been published and removed between opening and locking
            if os.fstat(lock.fileno()).st_ino == path.stat().st_ino:
                return lock
        except OSError:
            pass
        lock.close()
        raise RunError(
            f"another run is writing {self.target} (it holds {self.folder}); wait for it to end"
        )

    def _refuse_foreign(self) -> None:
        if not self.folder.exists():
            return
        ours = self.folder.is_dir() and (
            (self.folder / "lock").exists() or not any(self.folder.iterdir())
        )
        if not ours:
            raise StoreExistsError(
                f"{self.folder} is needed as work folder, but holds something else; move it away"
            )

    def _read_call(self) -> str | None:
        try:
            found: str = json.loads((self.folder / "call.json").read_text())[_KEY]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return found

    def _start_over(self, fingerprint: str) -> None:
        for name in ("call.json", "journal.jsonl"):
            (self.folder / name).unlink(missing_ok=True)
        if self.root.exists():
            shutil.rmtree(self.root)
        self.root.mkdir()
        write_file(self.folder / "call.json", json.dumps({_KEY: fingerprint}).encode())

    def _read_journal(self) -> None:
        """Believe every whole line whose files are there with their sizes."""
        path = self.folder / "journal.jsonl"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        lines = text.splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        for line in whole:
            entry = json.loads(line)
            files = {name: (size, hash) for name, (size, hash) in entry["files"].items()}
            if all(self._is_there(name, size) for name, (size, _) in files.items()):
                self.done[entry["task"]] = files
        if len(whole) != len(lines):
            # a line that a crash cut off would run into the next one
            path.write_text("".join(whole), encoding="utf-8")

    def _is_there(self, name: str, size: int) -> bool:
        try:
            return (self.root / name).stat().st_size == size
        except OSError:
            return False

    def record(self, task: int, files: Files) -> None:
        """Note in the journal, durably, that a task is finished.

        Parameters
        ----------
        task : int
            Number of the task.
        files : dict
            What it wrote.
        """
        self.done[task] = files
        self._journal.write(json.dumps({"task": task, "files": files}) + "\n")
        self._journal.flush()
        os.fsync(self._journal.fileno())

    @property
    def files(self) -> Files:
        """Everything that recorded tasks wrote."""
        return {name: entry for files in self.done.values() for name, entry in files.items()}

    def publish(self) -> None:
        """Put the finished store at its path in one step, and remove the work folder."""
        aside = self.folder / "replaced"
        if aside.exists():
            shutil.rmtree(aside)
        if self.target.exists():
            check_overwritable(self.target)
            self.target.rename(aside)
        self.root.rename(self.target)
        sync_folder(self.target.parent)
        self.discard()

    def discard(self) -> None:
        """Remove the work folder and all that is in it."""
        self._journal.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> StoreDraft:
        """Hold the draft."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give the lock back; what is done stays, for the next run to resume."""
        self._journal.close()
        self._lock.close()


def check_overwritable(target: Path) -> None:
    """Refuse to replace anything but a store of ours.

    Parameters
    ----------
    target : Path
        What would be replaced.

    Raises
    ------
    StoreExistsError
        If it is something else.
    """
    try:
        read_manifest(target)
        attributes: Any = json.loads((target / "zarr.json").read_text())["attributes"]
        ours = "ml4cube_format" in attributes
    except (StoreError, OSError, ValueError, KeyError, TypeError):
        ours = False
    if not ours:
        raise StoreExistsError(
            f"{target} exists and is no sample store of ours, so it is never overwritten; "
            "move it away or choose another path"
        )
