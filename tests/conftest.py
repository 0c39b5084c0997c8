"""Leave out what needs torch where torch is not installed."""

import importlib.util
import re
from pathlib import Path

WITHOUT_TORCH = importlib.util.find_spec("torch") is None
NEEDS_TORCH = re.compile(
    r"^(from|import) (torch|ml4cube\.(training|prediction|demo|datasets\.pytorch)|tests\.training)",
    re.MULTILINE,
)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Ignore a test file that imports torch, or a part of ml4cube that does, at its top."""
    if WITHOUT_TORCH and collection_path.suffix == ".py":
        return NEEDS_TORCH.search(collection_path.read_text()) is not None or None
    return None
