"""Findings: the rows of a leakage report, its sentences, and the verdict that sums them up."""

from __future__ import annotations

from typing import Any

import pandas as pd


class Findings:
    """The rows of a report's table and its sentences, added check by check."""

    def __init__(self, part: str) -> None:
        self.part = part
        self.rows: dict[str, dict[str, Any]] = {}
        # What was copied from train.
        self.leaks: list[str] = []
        # What else must be known to trust the score, and that test cells are scattered among
        # train cells, which a deployment settles.
        self.warnings: list[str] = []
        self.scattered: list[str] = []
        # Nearness to train compared with that of the deployment: a word, and what it says.
        self.nearness = "undecided"
        self.promise = ""
        # What the test part tests, and a split that would fit the deployment.
        self.tested = ""
        self.advice = ""
        # What was compared for copies ("tiles of 16 lat x 16 lon cells"), for the verdict.
        self.compared = ""
        # Fractions of the held-out cells or samples, for the figure.
        self.shares: dict[str, float] = {}

    def row(
        self, name: str, value: Any, unit: str, meaning: str, limit: Any = None, status: str = ""
    ) -> None:
        """Add the row of a check; the status is "ok", "leak", "warning", "unknown" or ""."""
        row = {"found": value, "unit": unit, "limit": limit, "status": status, "meaning": meaning}
        self.rows[name] = row

    def table(self) -> pd.DataFrame:
        """Return the rows as a table."""
        return pd.DataFrame.from_dict(self.rows, orient="index").rename_axis("check")

    def say(self, text: str, status: str) -> None:
        """Add the sentence of a check that was not passed."""
        if status == "leak":
            self.leaks.append(text)
        else:
            self.warnings.append(text)

    def copied(self, name: str, share: float, of: str, text: str, status: str = "leak") -> None:
        """Add row and sentence of what holds train values, or the target, in another form."""
        self.row(name, share, f"fraction of {of}", text, 0, status)
        self.say(text, status)

    @property
    def judgement(self) -> str:
        """Return "leaks" if something is copied, else the word on nearness."""
        if self.leaks:
            return "leaks"
        return self.nearness

    @property
    def doubts(self) -> list[str]:
        """What else must be known to trust the score."""
        return self.warnings + (self.scattered if self.nearness == "undecided" else [])

    def verdict(self, unit: str) -> str:
        """Return the judgement with its reasons; `unit` is "cell" or "sample"."""
        notes = list(self.doubts)
        word = self.judgement
        if word == "leaks":
            text = f"This split leaks, so its {self.part} score will be too optimistic: "
            text += "; ".join(self.leaks)
            if self.promise:
                notes.insert(0, f"without what is copied, {self.promise}")
        elif self.promise:
            words = {
                "too easy": "is too easy for the deployment",
                "fits": "fits the deployment",
                "too hard": "is too hard for the deployment",
                "undecided": "is undecided",
            }
            text = f"This split {words[word]}: {self.promise}"
        else:
            copies = "nothing could be compared for copies"
            if self.compared:
                copies = f"no {self.compared} are copies of those in train"
            tested = self.tested or f"how far {self.part} {unit}s are from train is not known"
            text = f"This split is undecided, because no deployment is given: {tested}; {copies}"
        note = ""
        if notes:
            note = f" Note that {'; '.join(notes)}."
        return f"{text}.{note} {self.advice}".rstrip()


def percent(share: float) -> str:
    """Write a fraction in percent, with two digits below 10 %."""
    if share >= 0.1:
        return f"{100 * share:.0f} %"
    return f"{100 * share:.2g} %"


def rounded(number: float) -> str:
    """Round to three digits, without powers of ten for thousands of kilometres."""
    return f"{float(f'{number:.3g}'):,.7g}"


def listed_and(texts: list[str]) -> str:
    """Join texts with commas and "and"."""
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))
