"""The picture of the house in the docs shows the rooms that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PICTURE = (ROOT / "docs" / "structure.md").read_text().split("```")[1]


def test_every_module_is_in_the_picture_and_the_other_way_round():
    rooms, folder = set(), ""
    for line in PICTURE.splitlines():
        if not line.startswith(" "):
            folder = ""
        for name in re.findall(r"[a-z_/]+\.py|[a-z_]+/", line.split("   ")[0] if folder else line):
            if name.endswith("/"):
                folder = name
                rooms.add(name)
            else:
                rooms.add(folder + name)
    package = ROOT / "ml4cube"
    drawn_in_detail = {room.partition("/")[0] for room in rooms if room.endswith(".py")}
    found = {f"{path.name}/" for path in package.iterdir() if (path / "__init__.py").exists()}
    for path in package.rglob("*.py"):
        name = path.relative_to(package).as_posix()
        if path.name != "__init__.py" and (
            "/" not in name or name.split("/")[0] in drawn_in_detail
        ):
            found.add(name)
    assert rooms == found - {"errors.py"}  # which only re-exports core/errors.py
