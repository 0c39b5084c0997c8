"""What objects print: a headline, facts and tables, as text (`repr`) and as HTML in notebooks.

An object says in `_summary` what it is. Only this module knows how that is shown.
"""

from __future__ import annotations

import html
import inspect
import math
import os
import textwrap
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

# Of a text: about how many lines, the most letters of a line, and rows that a table has at least.
_LINES, _LETTERS, _LEAST_ROWS = 15, 100, 12
# Most rows of a table in HTML.
_HTML_ROWS = 100
# Most names of a list, and letters of an argument.
_NAMES, _ARGUMENT_LETTERS = 12, 80
_MORE = "…"

# Colours are those of the page, so that it is readable in light and in dark notebooks.
_STYLE = """<style>
.ml4cube { color: inherit; line-height: 1.5; overflow-x: auto; }
.ml4cube-title { border-bottom: 1px solid currentColor; margin-bottom: 0.4em; }
.ml4cube table { background: none; border: none; border-collapse: collapse; color: inherit;
  font-size: inherit; margin: 0.2em 0 0.4em 1em; }
.ml4cube tr { background: none !important; }
.ml4cube th, .ml4cube td { border: none; font-weight: normal; max-width: 60em; min-width: 0;
  padding: 0.1em 1.2em 0.1em 0; text-align: left; vertical-align: top; white-space: normal; }
.ml4cube th { opacity: 0.65; white-space: nowrap; }
.ml4cube .ml4cube-number { font-variant-numeric: tabular-nums; text-align: right;
  white-space: nowrap; }
.ml4cube summary { cursor: pointer; }
.ml4cube details details { margin-left: 1em; }
</style>"""


@dataclass(frozen=True)
class Table:
    """A table of a summary; without columns, a list of sentences."""

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]

    @classmethod
    def listing(cls, sentences: Collection[str]) -> Table:
        """Return a list of sentences."""
        return cls((), [(sentence,) for sentence in sentences])

    def cells(self, most_rows: int) -> list[list[str]]:
        """Return the cells as texts, the columns' names first; the middle of a long one is cut."""
        rows = [list(map(shown, row)) for row in self.rows]
        if len(rows) > most_rows:
            rows[(most_rows - 1) // 2 : len(rows) - most_rows // 2] = [[_MORE] * len(rows[0])]
        if self.columns:
            rows.insert(0, list(self.columns))
        return rows

    def has_numbers(self, cells: list[list[str]]) -> list[bool]:
        """Return for each column of `cells` if it holds numbers below its name."""
        columns = zip(*cells, strict=True)
        return [bool(self.columns) and _are_numbers(column[1:]) for column in columns]


@dataclass(frozen=True)
class Summary:
    """What an object is: a headline, facts by label, and tables and other objects by name.

    Facts and tables that are None or empty are not shown.
    """

    headline: str = ""
    facts: Mapping[str, object] = field(default_factory=dict)
    sections: Mapping[str, Table | Summarized | None] = field(default_factory=dict)

    @property
    def texts(self) -> dict[str, str]:
        """The facts as texts."""
        texts = {shown(label): shown(value) for label, value in self.facts.items()}
        return {label: text for label, text in texts.items() if text}

    @property
    def tables(self) -> dict[str, Table]:
        """The tables."""
        return {n: t for n, t in self.sections.items() if isinstance(t, Table) and t.rows}

    @property
    def parts(self) -> dict[str, Summarized]:
        """The other objects."""
        return {n: part for n, part in self.sections.items() if isinstance(part, Summarized)}


class Summarized:
    """Base of objects that print as a summary, also one that is not complete."""

    __slots__ = ()

    def _summary(self) -> Summary:
        """Return what the object is; reads nothing, starts nothing."""
        raise NotImplementedError

    def __repr__(self) -> str:
        """Return the summary as text of about 15 lines."""
        return printable(_never_failing(self, _as_text))

    def _repr_html_(self) -> str:
        """Return the summary for notebooks, with sections that can be opened."""
        return f'<div class="ml4cube">{_STYLE}{_never_failing(self, _as_html)}</div>'


class PrintedAsCall(Summarized):
    """Base of objects that print as the call that makes them, without arguments left at defaults.

    The constructor's arguments are looked up as attributes of the same name, or with ``_`` before.
    """

    __slots__ = ()

    def _summary(self) -> Summary:
        """Return the arguments that differ from their defaults."""
        facts = {}
        for name, parameter in inspect.signature(type(self)).parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                continue  # it may hold secrets, such as the token of a service
            kept = name
            if not hasattr(self, name):
                kept = f"_{name}"
            text = one_line(getattr(self, kept, parameter.default))
            if text != one_line(parameter.default):
                facts[name] = text
        return Summary(facts=facts)

    def __repr__(self) -> str:
        """Return the call, in one line."""
        return printable(_never_failing(self, _as_call))


def printable(text: str) -> str:
    r"""Return a text with control characters as escapes, such as ``\x1b``, apart from line ends.

    Names and units come from files, and could move the cursor of a terminal or reverse its letters.
    """
    letters = list(text)
    for position, letter in enumerate(letters):
        is_space = letter == "\n" or unicodedata.category(letter) == "Zs"
        if not (is_space or letter.isprintable()):
            letters[position] = letter.encode("unicode_escape").decode()
    return "".join(letters)


def shown(value: object) -> str:
    """Return a value as text: numbers with at least four digits, sizes as ``lat: 4``, names."""
    if value is None:
        return ""
    if isinstance(value, str | bool):
        return " ".join(str(value).split())
    if isinstance(value, Integral):
        return f"{int(value):,}"
    if isinstance(value, Real):
        number = float(value)
        is_whole = number.is_integer() or abs(number) >= 1000
        if is_whole and abs(number) < 1e9:
            return f"{number:,.0f}"
        return f"{number:.4g}"
    if isinstance(value, Mapping):
        return _listed([f"{name}: {shown(item)}" for name, item in value.items()])
    if isinstance(value, Collection):
        return _listed([shown(item) for item in value])
    return " ".join(str(value).split())


def _listed(texts: Sequence[str]) -> str:
    if len(texts) <= _NAMES:
        return ", ".join(texts)
    return f"{', '.join(texts[: _NAMES - 1])}, {_MORE} ({len(texts)} in all)"


def counted(n: int, singular: str, many: str | None = None) -> str:
    """Return a number with its noun: "1 batch", "2 batches"."""
    return f"{n:,} {singular if n == 1 else many or f'{singular}s'}"


def bytes_text(number: float) -> str:
    """Return a number of bytes as text, such as "12.3 MB"."""
    exponent = 0 if number < 1 else min(int(math.log10(number)) // 3, 4)
    return f"{number / 1000**exponent:.4g} {('B', 'kB', 'MB', 'GB', 'TB')[exponent]}"


def one_line(value: Any) -> str:
    """Return an argument as Python text in one line; of a large object, its type and sizes."""
    kind, sizes = type(value).__name__, getattr(value, "sizes", None)
    if isinstance(sizes, Mapping):
        return f"<{kind} {', '.join(f'{dim}: {n}' for dim, n in sizes.items())}>"
    text = repr(os.fspath(value) if isinstance(value, os.PathLike) else value)
    if " at 0x" in text:  # a function, or an object without a repr of its own
        return f"<{getattr(value, '__name__', kind).strip('<>')}>"
    if len(text) <= _ARGUMENT_LETTERS and "\n" not in text:
        return text
    return f"<{kind}>"


def _never_failing(summarized: Summarized, render: Callable[[str, Summary], str]) -> str:
    """Render an object, or say why it cannot be, as in a debugger after its constructor failed."""
    title = type(summarized).__name__
    try:
        return render(title, summarized._summary())
    except Exception as error:
        return render(title, Summary(f"not complete: {type(error).__name__}: {error}"))


def _as_call(title: str, summary: Summary) -> str:
    arguments = [f"{name}={text}" for name, text in summary.texts.items()]
    return f"{title}({', '.join(arguments) or summary.headline})"


def _as_text(title: str, summary: Summary) -> str:
    headlines = {name: _never_failing(part, _part_headline) for name, part in summary.parts.items()}
    facts, tables = {**summary.texts, **headlines}, summary.tables
    width = 2 + max(map(len, facts), default=0)
    lines = _wrapped(f"<{title}> {shown(summary.headline)}", "", "    ")
    for label, text in facts.items():
        lines += _wrapped(text, f"{label}:".ljust(width), " " * width)
    if tables:  # They share the lines that are left.
        headings = sum(1 + bool(table.columns) for table in tables.values())
        left = _LINES - len(lines) - headings
        for name, table in tables.items():
            lines += [f"{name}:", *_table_lines(table, max(left // len(tables), _LEAST_ROWS))]
    return "\n".join(lines)


def _wrapped(text: str, first: str, others: str) -> list[str]:
    """Return the lines of a text, `first` before the first one and `others` before the others."""
    wrapper = textwrap.TextWrapper(_LETTERS, initial_indent=first, subsequent_indent=others)
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return wrapper.wrap(text)


def _table_lines(table: Table, most_rows: int) -> list[str]:
    """Return the lines of a table, its numbers aligned at the right; columns that fit."""
    cells = table.cells(most_rows)
    if not table.columns:
        return [line for (text,) in cells for line in _wrapped(text, "    ", "      ")]
    lines = [" " * 2] * len(cells)
    for column, is_number in zip(zip(*cells, strict=True), table.has_numbers(cells), strict=True):
        width = max(map(len, column))
        if len(f"{lines[0]}  {'':{width}}  {_MORE}") > _LETTERS:
            lines = [f"{line}  {_MORE}" for line in lines]
            break
        side = "<"
        if is_number:
            side = ">"
        lines = [f"{line}  {cell:{side}{width}}" for line, cell in zip(lines, column, strict=True)]
    return [line.rstrip() for line in lines]


def _part_headline(title: str, summary: Summary) -> str:
    return shown(summary.headline) or title


def _are_numbers(texts: Sequence[str]) -> bool:
    shown_texts = [text for text in texts if text not in ("", _MORE)]
    unsigned = [text.lstrip("-") for text in shown_texts]
    return bool(shown_texts) and all(t[:1].isdigit() or t in ("nan", "inf") for t in unsigned)


def _as_html(title: str, summary: Summary) -> str:
    headline = html.escape(shown(summary.headline))
    return (
        f'<div class="ml4cube-title"><b>{html.escape(title)}</b> {headline}</div>'
        f"{_html_body(summary)}"
    )


def _html_body(summary: Summary) -> str:
    facts = "".join(
        f"<tr><th>{html.escape(label)}</th><td>{html.escape(text)}</td></tr>"
        for label, text in summary.texts.items()
    )
    tables = "".join(
        f'<details open="open"><summary>{html.escape(name)}</summary>{_html_table(table)}</details>'
        for name, table in summary.tables.items()
    )
    parts = "".join(
        f"<details><summary>{html.escape(name)}: {_never_failing(part, _html_headline)}</summary>"
        f"{_never_failing(part, lambda _, inner: _html_body(inner))}</details>"
        for name, part in summary.parts.items()
    )
    return f"{f'<table>{facts}</table>' if facts else ''}{tables}{parts}"


def _html_headline(title: str, summary: Summary) -> str:
    return html.escape(_part_headline(title, summary))


def _html_table(table: Table) -> str:
    cells = table.cells(_HTML_ROWS)
    kinds = [' class="ml4cube-number"' * is_number for is_number in table.has_numbers(cells)]
    lines = []
    for number, row in enumerate(cells):
        tag = "td"
        if table.columns and number == 0:
            tag = "th"
        pairs = zip(kinds, row, strict=True)
        lines.append("".join(f"<{tag}{kind}>{html.escape(c)}</{tag}>" for kind, c in pairs))
    return f"<table><tr>{'</tr><tr>'.join(lines)}</tr></table>"
