"""Hooks of the site's build: formulas, line breaks, and tables on phones.

Formulas become SVG, which needs no script, font or network. A number stays on a line with its interval. Cells of
tables of words hold their headings, since on phones each row becomes a card.
"""

from __future__ import annotations

import html
import re
from typing import Any

import ziamath

from bln.experiments.report.markup import unbroken

LONG = 34
"""A cell with more characters than this, or a word of them, does not fit beside others on a phone."""


def on_config(config: Any) -> Any:
    """Return the configuration, with fences of the language ``math`` drawn as formulas, as Git hosts do."""
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {})
    fences["custom_fences"] = [{"name": "math", "class": "math", "format": _draw}]
    return config


def _draw(source: str, *_: Any, **__: Any) -> str:
    drawn = ziamath.Latex(source.strip(), size=19, color="currentColor").svg()
    return f'<div class="math" role="img" aria-label="{html.escape(source.strip())}">{drawn}</div>'


def on_page_content(content: str, **_: Any) -> str:
    """Return the page without line breaks between a number and its interval, and with tables that fit phones."""
    return re.sub(r"<table>.*?</table>", lambda match: _cards(match[0]), unbroken(content), flags=re.DOTALL)


def _cards(table: str) -> str:
    """Return the table, marked ``data-cards`` if its rows are too wide for a phone."""
    headings, *rows = (re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in table.split("</tr>")[:-1])
    texts = [_text(cell) for row in rows for cell in row]
    of_words = len(headings) > 2 and max(map(len, texts)) > LONG
    if not of_words and max(len(word) for text in texts for word in re.split(r"[\s-]", text)) <= LONG:
        return table
    cards = "".join(f"<tr>{''.join(map(_cell, row, headings, range(len(row))))}</tr>" for row in rows)
    head = table[len("<table>") : table.index("<tbody>")]
    return f"<table data-cards>{head}<tbody>{cards}</tbody></table>"


def _cell(content: str, heading: str, at: int) -> str:
    """Return a cell with its heading; the first one is the title of its card, unless it is a bare number."""
    heading = "" if at == 0 and not content.isdigit() else html.escape(_text(heading))
    return f'<td data-heading="{heading}">{content}</td>'


def _text(cell: str) -> str:
    return re.sub("<[^>]+>", "", cell)
