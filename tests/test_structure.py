"""The picture of the package in the docs shows the modules that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PICTURE = (ROOT / "docs" / "explanation" / "structure.md").read_text().split("```")[1]


def test_every_module_is_in_the_picture_and_the_other_way_round():
    drawn, folder = set(), ""
    for line in PICTURE.splitlines():
        if not line.startswith(" "):
            folder = ""
        for name in re.findall(r"[a-z_/]+\.py|[a-z_]+/", line.split("   ")[0] if folder else line):
            if name.endswith("/"):
                folder = name
                drawn.add(name)
            else:
                drawn.add(folder + name)
    package = ROOT / "ml4cube"
    drawn_in_detail = {name.partition("/")[0] for name in drawn if name.endswith(".py")}
    found = {f"{path.name}/" for path in package.iterdir() if (path / "__init__.py").exists()}
    for path in package.rglob("*.py"):
        name = path.relative_to(package).as_posix()
        if path.name != "__init__.py" and (
            "/" not in name or name.split("/")[0] in drawn_in_detail
        ):
            found.add(name)
    assert drawn == found - {"errors.py"}  # which only re-exports core/errors.py
