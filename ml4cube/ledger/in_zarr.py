"""Groups of a user's zarr store, into which an unfinished store is copied when it is finished."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ml4cube.core.errors import InvalidValueError, StoreExistsError
from ml4cube.ledger.folders import MARKER, Folder, group_json, size_and_hash

# Key, in JSON, of the files that a copy writes.
_DRAFT_KEY = "ml4cube_draft"


@dataclass(frozen=True)
class ZarrFolder(Folder):
    """A group of a zarr store that is not a folder of files: an Icechunk session, or memory."""

    store: Any
    # Path of the group inside it; empty for its root.
    path: str = ""

    is_session = True

    def write(self, path: str, *pieces: bytes) -> tuple[int, str]:
        from zarr.buffer.cpu import Buffer

        data = b"".join(pieces)
        wait_for(self.store.set(self._key(path), Buffer.from_bytes(data)))
        return size_and_hash(data)

    def read(self, path: str) -> bytes:
        from zarr.buffer import default_buffer_prototype

        buffer = wait_for(self.store.get(self._key(path), default_buffer_prototype()))
        if buffer is None:
            raise FileNotFoundError(f"{self} has no {path}")
        content: bytes = buffer.to_bytes()
        return content

    def size(self, path: str) -> int | None:
        if not wait_for(self.store.exists(self._key(path))):
            return None
        return int(wait_for(self.store.getsize(self._key(path))))

    def list(self) -> dict[str, int]:
        prefix = self._key("")

        async def sizes() -> dict[str, int]:
            group_exists = not self.path or await self.store.exists(self._key(MARKER))
            # Icechunk refuses to list below a missing group, other stores may have files there
            listed = self.store.list_prefix(prefix) if group_exists else self.store.list()
            keys = [key async for key in listed if key.startswith(prefix)]
            return {k.removeprefix(prefix): int(await self.store.getsize(k)) for k in keys}

        listed: dict[str, int] = wait_for(sizes())
        return listed

    def remove(self, path: str) -> None:
        """Remove an array or a group, with its content."""
        wait_for(self.store.delete_dir(self._key(path)))

    def groups_from_root(self) -> Sequence[ZarrFolder]:
        """Return the groups from the root down to this one."""
        parts = self.path.split("/") if self.path else []
        depths = range(len(parts) + 1)
        return [ZarrFolder(self.store, "/".join(parts[:depth])) for depth in depths]

    def _key(self, path: str) -> str:
        return f"{self.path}/{path}" if self.path else path

    def __str__(self) -> str:
        name = type(self.store).__name__
        return f"{name} at {self.path!r}" if self.path else name

    def zarr_store(self) -> tuple[Any, ZarrFolder, str]:
        return self.store, ZarrFolder(self.store), self.path

    def system_and_path(self) -> tuple[Any, str]:
        # read-only views of a store in memory are other objects with the same name
        name = str(self.store)
        return name if name.startswith("memory://") else self.store, self.path

    def record_copy(self, files: Sequence[str]) -> None:
        for group in self.groups_from_root()[:-1]:
            if group.size(MARKER) is None:  # readers do not look into a folder without it
                group.write(MARKER, group_json({}))
        if self.store.supports_deletes:  # a zip file would keep both versions of the group
            self.write(MARKER, group_json({_DRAFT_KEY: files}))

    def removals(self, old: set[str]) -> Sequence[Callable[[], None]]:
        children = {name.partition("/")[0] for name in old} - {MARKER}
        return [partial(self.remove, child) for child in sorted(children)]

    def half_copied(self) -> set[str]:
        try:
            return set(json.loads(self.read(MARKER))["attributes"][_DRAFT_KEY])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return set()

    def check_target(self, argument: str) -> None:
        # all groups above are written in zarr v3, and would hide one of zarr v2
        for group in self.groups_from_root()[:-1]:
            with contextlib.suppress(KeyError):  # Icechunk refuses names of zarr v2
                if group.size(MARKER) is None and group.size(".zgroup") is not None:
                    raise InvalidValueError(
                        f"{argument}={str(self)!r} is inside the group {str(group)!r} of zarr v2, "
                        "which samples in zarr v3 would hide; give another path"
                    )

    def check_removable(self) -> None:
        if not self.store.supports_deletes:
            raise StoreExistsError(
                f"{self} exists, and a {type(self.store).__name__} cannot remove files, so it is "
                "not overwritten; write to a new one"
            )


def wait_for(coroutine: Any) -> Any:
    """Wait for a coroutine of a zarr store, also inside a running event loop."""
    from zarr.core.sync import sync

    return sync(coroutine)
