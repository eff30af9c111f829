"""Results for people: drawn tables on a terminal, plain Markdown in a pipe."""

import re
import sys


def show(text: str) -> None:
    """Prints `text` to stdout. On a terminal the tables of its Markdown are drawn; one that is too wide for the
    terminal is turned, so that its columns become rows. "?" stands for what the encoding of stdout lacks."""
    if sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")
    if not sys.stdout.isatty():
        print(text)
        return
    from rich.console import Console

    console = Console()
    for part in re.split(r"((?:^\|.*\|$\n?)+)", text, flags=re.M):
        if part.startswith("|"):
            rows = [_cells(line) for line in part.splitlines()]
            table = _table(rows)
            if _width(console, table) > console.width:
                table = _table(_turned(rows))
            console.print(table)
        elif part.strip("\n"):
            console.print(part.strip("\n"), markup=False, highlight=False)


def _cells(line: str) -> list[str]:
    """The cells of a line of a Markdown table, without Markdown's backslashes."""
    return [re.sub(r"\\(.)", r"\1", cell.strip()) for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def _turned(rows: list[list[str]]) -> list[list[str]]:
    """The table with rows and columns exchanged; `rows[1]` says how columns are aligned."""
    turned = [list(cells) for cells in zip(rows[0], *rows[2:])]
    return [turned[0], ["---", *["---:"] * (len(turned[0]) - 1)], *turned[1:]]


def _table(rows: list[list[str]]):
    from rich.table import Table
    from rich.text import Text

    table = Table(header_style="bold", border_style="dim")
    for name, align in zip(rows[0], rows[1]):
        table.add_column(Text(name), justify="right" if align.endswith(":") else "left")
    for row in rows[2:]:
        table.add_row(*map(Text, row))
    return table


def _width(console, table) -> int:
    """Columns that the table takes when no cell is broken."""
    return console.measure(table, options=console.options.update(max_width=10_000)).maximum
