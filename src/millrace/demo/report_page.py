"""What the report's page is made of: its style, and HTML of text that may hold anything."""

from __future__ import annotations

import difflib
import html
from collections.abc import Iterable, Sequence

INK, MUTED, RULE = "#1c2733", "#66727f", "#dfe4ea"
TEAL, AMBER, BLUE, RED = "#1f7a8c", "#e39b2d", "#7aa6c2", "#b8433a"
VIOLET, LILAC, SLATE = "#5c4d7d", "#a795cf", "#9db4c0"

_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #f5f7f9; color: #1c2733;
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 40px 24px 64px; }
header p { color: #66727f; margin: 4px 0 0; max-width: 46em; }
h1 { font-size: 28px; line-height: 1.2; margin: 0; letter-spacing: -.01em; }
h2 { font-size: 17px; margin: 0 0 2px; }
.note { color: #66727f; font-size: 13.5px; margin: 0 0 10px; }
.note b { color: #1c2733; font-weight: 600; }
.warning { background: #fbf0ef; border: 1px solid #e7c3c0; border-radius: 10px; color: #8e2f28; padding: 10px 16px;
  margin: 20px 0 0; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin: 26px 0; }
.tile, section { background: #fff; border: 1px solid #dfe4ea; border-radius: 10px; }
.tile { padding: 14px 16px; flex: 1 1 210px; }
.tile b { display: block; font-size: 25px; line-height: 1.2; font-weight: 650; font-variant-numeric: tabular-nums; }
.tile span { color: #66727f; font-size: 13px; line-height: 1.35; display: block; margin-top: 2px; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(430px, 100%), 1fr)); gap: 16px; }
section { padding: 18px 20px; margin-bottom: 16px; min-width: 0; }
.pair section { margin-bottom: 0; } .pair { margin-bottom: 16px; }
svg { width: 100%; height: auto; display: block; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 6px 10px; border-bottom: 1px solid #eef1f4; white-space: nowrap; }
th { color: #66727f; font-weight: 600; vertical-align: bottom; white-space: normal; line-height: 1.3; }
th:first-child, td:first-child, .text th, .text td { text-align: left; }
.text td { white-space: normal; }
.plain td:first-child { white-space: nowrap; width: 1%; padding-right: 18px; }
tr:last-child td { border-bottom: 0; }
tr.restart td { background: #fbf0ef; color: #b8433a; text-align: left; font-size: 13px; white-space: normal; }
td.odd { background: #fbf0ef; color: #b8433a; }
.workers { margin-top: 14px; }
.workers th:nth-child(2), .workers td:nth-child(2) { text-align: left; }
.epochs th, .epochs td { padding: 5px 7px; }
.workers td.share { width: 34%; min-width: 160px; }
.share div { display: flex; height: 12px; border-radius: 3px; overflow: hidden; background: #eef1f4; }
.dot { display: inline-block; width: 9px; height: 9px; border-radius: 2px; margin-right: 5px; }
del { color: #b8433a; text-decoration: line-through; text-decoration-thickness: 1px; background: #fbf0ef; }
ins { color: #b8433a; text-decoration: none; background: #fbf0ef; border-bottom: 2px solid #b8433a; }
.tag { font-size: 12px; color: #66727f; white-space: nowrap; }
code { font: 13px ui-monospace, "SF Mono", Menlo, Consolas, monospace; overflow-wrap: anywhere; }
footer { color: #66727f; font-size: 13px; margin-top: 20px; }
@media print { body { background: #fff; } section, .tile { break-inside: avoid; } }
"""


def page(title: str, body: str) -> str:
    """A whole document around the HTML `body`."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n"
        "</body>\n</html>\n"
    )


def section(title: str, note: str, body: str) -> str:
    """A box with a heading; `note` and `body` are HTML."""
    note = f'<p class="note">{note}</p>' if note else ""
    return f"<section><h2>{title}</h2>{note}{body}</section>"


def pair(*sections: str) -> str:
    """Boxes beside each other where there is room."""
    return f'<div class="pair">{"".join(sections)}</div>'


def tiles(values: Iterable[tuple[str, str]]) -> str:
    """Large figures, each with what it is of. Both are HTML."""
    cells = "".join(f"<div class=tile><b>{value}</b><span>{label}</span></div>" for value, label in values)
    return f'<div class="tiles">{cells}</div>'


def table(heads: Sequence[str], rows: Iterable[str], *, kind: str = "") -> str:
    """A table of `heads` (HTML) and whole rows (`row`, `note_row`)."""
    head = "".join(f"<th>{name}</th>" for name in heads)
    classes = f"wide {kind}".rstrip()
    return f'<div class="{classes}"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def row(cells: Iterable[str]) -> str:
    """A row of cells that are HTML; one that begins with `<td` is taken as it is."""
    return "<tr>" + "".join(cell if cell.startswith("<td") else f"<td>{cell}</td>" for cell in cells) + "</tr>"


def note_row(text: str, columns: int) -> str:
    """A row that has one text, over all columns."""
    return f'<tr class="restart"><td colspan="{columns}">{html.escape(text)}</td></tr>'


def pairs(rows: Iterable[tuple[str, str]]) -> str:
    """A table of names and values, both plain text."""
    body = "".join(
        f"<tr><td>{html.escape(name)}</td><td><code>{html.escape(value)}</code></td></tr>" for name, value in rows
    )
    return f'<div class="text plain"><table><tbody>{body}</tbody></table></div>'


def share_bar(parts: Iterable[tuple[float, str]]) -> str:
    """A cell with a bar of parts (a number of any size, a colour)."""
    parts = list(parts)
    total = sum(value for value, _ in parts) or 1.0
    bits = "".join(
        f'<i style="width:{100 * value / total:.2f}%;background:{colour}"></i>' for value, colour in parts if value > 0
    )
    return f'<td class="share"><div>{bits}</div></td>'


def marked(said: str, heard: str) -> tuple[str, str]:
    """Both texts as HTML, with what only the first has in `<del>` and what only the second has in `<ins>`."""
    left, right = [], []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, said, heard, autojunk=False).get_opcodes():
        one, other = html.escape(said[a:b]), html.escape(heard[c:d])
        left.append(one if kind == "equal" or not one else f"<del>{one}</del>")
        right.append(other if kind == "equal" or not other else f"<ins>{other}</ins>")
    return "".join(left), "".join(right)
