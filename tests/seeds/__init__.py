"""Code written before this package, which promises to run it.

000 and 002 are of ml4xcube, 001 is of zae-engine, 003 has an `AdvancedTrainer`. The blocks run as
they stand, but for the package name.
"""

from pathlib import Path

BLOCKS = Path(__file__).parent / "blocks"
RENAMED = {
    "ml4xcube": "ml4cube",
    "zae_engine.trainer.addons": "ml4cube.training.addons",
    "zae_engine.trainer": "ml4cube.training.trainer",
    "zae_engine.schedulers": "ml4cube.training.schedulers",
}


def block(name: str) -> str:
    """Text of one code block, e.g. ``block("002_1")``, with the package renamed."""
    text = (BLOCKS / f"{name}.txt").read_text()
    for old, new in RENAMED.items():
        text = text.replace(old, new)
    return text
