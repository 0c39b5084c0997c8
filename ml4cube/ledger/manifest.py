"""The list of all files of a store, with their sizes and hashes, in the subgroup ``manifest``.

It shows what is missing or damaged, and which files at a location are ours to replace.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor

from ml4cube.core.errors import StoreError
from ml4cube.ledger.folders import (
    FILES_AT_ONCE,
    HASH_ALGORITHM,
    Files,
    Folder,
    digest,
    group_json,
    json_bytes,
)
from ml4cube.ledger.locations import Location, folder_of

#: File that holds the list.
MANIFEST = "manifest/zarr.json"
# Written into every folder that they show; nothing of a user's is in them.
_OF_FILE_BROWSERS = {".DS_Store", "Thumbs.db", "desktop.ini"}


class NoStoreError(StoreError):
    """There is no sample store at a location, not even a damaged one."""


def write_manifest(folder: Folder, files: Files) -> None:
    """Write the list of all other files."""
    folder.write(MANIFEST, _manifest_bytes(files))


def _manifest_bytes(files: Files) -> bytes:
    """Return the manifest of these files, with their hash, as zarr metadata of a group."""
    hashed = digest(json_bytes(files))
    return group_json({"algorithm": HASH_ALGORITHM, "digest": hashed, "files": files})


def read_manifest(location: Location) -> Files:
    """Return the files that a store must have; refuse a damaged manifest."""
    try:
        raw = folder_of(location).read(MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        raise NoStoreError(
            f"{location} is not a sample store, or not a complete one (it has no manifest); make "
            "it again with MultiProcSampler"
        ) from None
    except OSError as error:
        raise StoreError(f"{MANIFEST} of {location} cannot be read: {error}") from error
    try:
        listed = json.loads(raw)["attributes"]["files"]
        files = {str(name): (int(size), str(hash)) for name, (size, hash) in listed.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        files = {}
    # comparing all bytes also notices damage outside the list of files
    if raw != _manifest_bytes(files):
        raise StoreError(
            f"{MANIFEST} (the manifest) of {location} is damaged; make the store again"
        )
    return files


def is_metadata(path: str) -> bool:
    return path.rpartition("/")[2] == "zarr.json"


def fault_of(
    path: str, listed: tuple[int, str], size: int | None, content: bytes | None
) -> str | None:
    """Describe how a file differs from the manifest, by its size and, if read, its content."""
    listed_size, listed_hash = listed
    if size is None:
        return f"{path} is missing"
    if size != listed_size:
        return f"{path} has {size} bytes instead of {listed_size}"
    if content is not None and digest(content) != listed_hash:
        return f"{path} has changed since it was written"
    return None


def find_faults(location: Location, files: Files, *, hashes: bool = True) -> dict[str, str]:
    """Return how files differ from their list, by path; of those that are not metadata, the hash
    is compared only with `hashes`.
    """
    folder = folder_of(location)
    sizes = folder.list()

    def check(path: str) -> str | None:
        size = sizes.get(path)
        must_read = size == files[path][0] and (hashes or is_metadata(path))
        return fault_of(path, files[path], size, folder.read(path) if must_read else None)

    with ThreadPoolExecutor(FILES_AT_ONCE, "ml4cube-verify") as threads:
        faults = zip(files, threads.map(check, files), strict=True)
        return {path: fault for path, fault in faults if fault is not None}


def find_foreign(location: Location) -> list[str]:
    """Return the files at a location that are not listed, or have changed since.

    A file that is missing is not among them. Raises StoreError where there is no intact list.
    """
    files = read_manifest(location)
    names = folder_of(location).list()
    existing = {path for path in names if os.path.basename(path) not in _OF_FILE_BROWSERS}
    existing.discard(MANIFEST)
    listed = {path: files[path] for path in files if path in existing}
    return [*sorted(existing - files.keys()), *find_faults(location, listed)]
