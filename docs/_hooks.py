"""Formulas become MathML when the site is built: browsers draw that themselves, without a script or a network."""

from __future__ import annotations

from typing import Any

from latex2mathml.converter import convert


def on_config(config: Any) -> Any:
    """Have fences of the language ``math``, which GitHub draws too, rendered here."""
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {})
    fences["custom_fences"] = [{"name": "math", "class": "math", "format": _draw}]
    return config


def _draw(source: str, *_: Any, **__: Any) -> str:
    return f'<div class="math">{convert(source, display="block")}</div>'
