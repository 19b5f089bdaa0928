"""What is done when the site is built.

Formulas become SVG: readers need no script, no font and no network for them. Numbers stay on a line with their
intervals.
"""

from __future__ import annotations

import html
from typing import Any

import ziamath

from bln.experiments.report.markup import together


def on_config(config: Any) -> Any:
    """Return the configuration with fences of the language ``math``, which Git hosts draw too, drawn here."""
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {})
    fences["custom_fences"] = [{"name": "math", "class": "math", "format": _draw}]
    return config


def _draw(source: str, *_: Any, **__: Any) -> str:
    drawn = ziamath.Latex(source.strip(), size=19, color="currentColor").svg()
    return f'<div class="math" role="img" aria-label="{html.escape(source.strip())}">{drawn}</div>'


def on_page_content(content: str, **_: Any) -> str:
    """Return the page with no line break inside of a number and its interval."""
    return together(content)
