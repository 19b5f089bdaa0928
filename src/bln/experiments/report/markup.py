"""The markup of reports: HTML from escaped text, Markdown tables, and the files of a page."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from .style import Plot, variables


class Html(str):
    """Text that is markup already, and is not escaped again."""

    __slots__ = ()


def safe(value: str) -> Html:
    """Escape text, and leave markup as it is."""
    return value if isinstance(value, Html) else Html(html.escape(value))


def tag(name: str, *content: str, **attributes: str) -> Html:
    """Return an element; ``class_`` is its class, and underscores in names become hyphens.

    >>> tag("p", "1 < 2", class_="note")
    '<p class="note">1 &lt; 2</p>'
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(value)}"' for key, value in attributes.items()
    )
    return Html(f"<{name}{written}>{''.join(map(safe, content))}</{name}>")


def join(parts: Iterable[str], between: str = "\n") -> Html:
    """Join pieces into one."""
    return Html(between.join(map(safe, parts)))


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], class_: str = "") -> Html:
    """Return a table in a box that scrolls where the page is narrower. A cell may be a ``<td>`` already."""

    def cell(value: str) -> Html:
        return Html(value) if isinstance(value, Html) and value.startswith("<td") else tag("td", value)

    heading = tag("tr", *(tag("th", text, scope="col") for text in head))
    body = join((tag("tr", *map(cell, row)) for row in rows), "")
    whole = tag("table", tag("thead", heading), tag("tbody", body), class_=class_)
    return join([tag("p", caption, class_="caption"), scrolling(whole, caption)])


def scrolling(content: Html, label: str) -> Html:
    """Return a box that scrolls sideways, by keyboard too."""
    return tag("div", content, class_="scroll", tabindex="0", role="region", aria_label=label)


def figure(plot: Plot) -> Html:
    """Return a figure with its caption and a description for screen readers."""
    width = 72 * plot.figure.get_figwidth()
    svg = plot.inline().replace("<svg ", f'<svg role="img" aria-label="{html.escape(plot.alt)}" id="{plot.name}" ', 1)
    svg = svg.replace("<svg ", f'<svg style="max-width:{1.6 * width:.0f}px" ', 1)
    files = join((tag("a", kind, href=f"figures/{plot.name}.{kind.lower()}") for kind in ("PNG", "SVG")), " ")
    caption = tag("figcaption", plot.caption, " ", tag("span", files, class_="files"))
    return tag("figure", scrolling(Html(svg), plot.name), caption)


def badge(word: str) -> Html:
    """Return a verdict as sign, word and colour, each of which tells it alone."""
    kind = next((kind for kind, words in _KINDS.items() if word in words), "open")
    return tag("span", f"{_SIGNS[kind]} {word}", class_=f"badge {kind}")


_KINDS = {
    "good": ("reproduced", "holds", "ahead", "level"), "bad": ("not reproduced", "does not hold", "behind"),
    "mixed": ("in part",), "open": ("undecided",),
}  # fmt: skip
_SIGNS = {"good": "✓", "bad": "✗", "mixed": "◐", "open": "?"}


_CODE = re.compile(r"(<pre.*?</pre>)", re.DOTALL)
_UNBROKEN = re.compile(r"[\d.] ± [\d.]+|[\d.] \[\S?[\d.]+, \S?[\d.]+\]|\d %|\bk = \d")


def unbroken(page: str) -> str:
    """Return a page without line breaks between a number and its interval or unit."""
    parts = _CODE.split(page)
    parts[::2] = [_UNBROKEN.sub(lambda match: match[0].replace(" ", "\N{NO-BREAK SPACE}"), part) for part in parts[::2]]
    return "".join(parts)


def document(title: str, body: str) -> str:
    """Return a whole page, which loads nothing."""
    css = _CSS.replace("LIGHT", variables(dark=False)).replace("DARK", variables(dark=True))
    head = join(
        [
            Html('<meta charset="utf-8">'),
            Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            Html('<meta name="color-scheme" content="light dark">'),
            Html('<link rel="icon" href="data:,">'),
            tag("title", title),
            tag("style", Html(css)),
        ]
    )
    main = unbroken(tag("main", body))
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{main}\n</body>\n</html>\n'


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def listed(words: Sequence[object]) -> str:
    """Join words by commas and a last *and*.

    >>> listed([1, 4, 32])
    '1, 4 and 32'
    """
    *firsts, last = map(str, words) if words else [""]
    return f"{', '.join(firsts)} and {last}" if firsts else last


def save(path: Path, text: str, plots: Iterable[Plot]) -> Path:
    """Write a page, and its figures to the folder ``figures`` as PNG and SVG; return the page's path."""
    figures = path.parent / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    for plot in plots:
        plot.save(figures)
    path.write_text(text, encoding="utf-8")
    return path


_CSS = """
:root { color-scheme: light dark; --back:#ffffff; --ink:#1f2328; --soft:#57606a; --line:#d5d9de; --panel:#f6f8fa;
  --good:#116329; --good-back:#dafbe1; --bad:#a40e26; --bad-back:#ffebe9; --mixed:#7d4e00; --mixed-back:#fff3cd;
  --link:#0058a3; LIGHT }
@media (prefers-color-scheme: dark) { :root { --back:#14171c; --ink:#e6e9ee; --soft:#a3adb8; --line:#3a4048;
  --panel:#1d2127; --good:#7ee29a; --good-back:#12351f; --bad:#ff9d94; --bad-back:#47161a; --mixed:#f2cc60;
  --mixed-back:#3d2e00; --link:#79b8ff; DARK } }
* { box-sizing: border-box; }
body { margin:0; background:var(--back); color:var(--ink); line-height:1.5; overflow-wrap:break-word;
  font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue","DejaVu Sans",sans-serif; font-size:16px; }
main { max-width:1240px; margin:0 auto; padding:24px 20px 64px; }
h1 { font-size:1.8rem; line-height:1.2; margin:.4em 0 .3em; }
h2 { font-size:1.4rem; margin:2.2em 0 .5em; padding-top:.6em; border-top:1px solid var(--line); }
h3 { font-size:1.1rem; margin:1.8em 0 .4em; }
p, ul, ol { max-width:75ch; }
a { color:var(--link); }
.meta, .note, figcaption, .caption, .files { color:var(--soft); font-size:.9rem; }
.scroll { overflow-x:auto; max-width:100%; margin:.6em 0; }
.scroll:focus-visible { outline:2px solid var(--link); outline-offset:2px; }
figure { margin:1.4em 0; }
figure svg { display:block; width:100%; height:auto; margin:0 auto; }
figcaption { max-width:80ch; margin:.3em auto 0; }
.files a { margin-left:.4em; }
table { border-collapse:collapse; font-size:.9rem; font-variant-numeric:tabular-nums; }
.caption { max-width:95ch; margin:1.6em 0 .2em; }
.files { white-space:nowrap; }
th, td { padding:.32em .6em; border-bottom:1px solid var(--line); text-align:left; vertical-align:top; }
th { font-weight:600; vertical-align:bottom; }
thead th { border-bottom:2px solid var(--soft); }
.results td { white-space:nowrap; }
.claims td { min-width:11em; }
.claims td:first-child { min-width:13em; }
.claims small, .overview small { display:block; color:var(--soft); }
.overview { width:100%; }
.overview td:last-child { min-width:10em; }
.badge { display:inline-block; white-space:nowrap; padding:.05em .55em; border-radius:1em; font-size:.82rem;
  font-weight:600; color:var(--soft); background:var(--panel); border:1px solid var(--line); }
.good { color:var(--good); background:var(--good-back); border-color:transparent; }
.bad { color:var(--bad); background:var(--bad-back); border-color:transparent; }
.mixed { color:var(--mixed); background:var(--mixed-back); border-color:transparent; }
.configurations td { padding:.18em .7em; white-space:nowrap; }
.configurations .t, .configurations .f { color:#1f2328; text-align:center; min-width:3em;
  border:1px solid var(--back); }
.configurations .t { background:#c6dbef; }
.configurations .f { background:#f2dfc0; }
.first { font-weight:700; }
details { margin:1em 0; }
summary { cursor:pointer; font-weight:600; }
.missing { background:var(--panel); border-left:4px solid var(--soft); padding:.6em 1em; }
.missing ul { margin:.3em 0; padding-left:1.2em; }
code { font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace; font-size:.92em; }
@media (max-width:600px) { table { font-size:.76rem; } th, td { padding:.3em .35em; }
  .results td:first-child { white-space:normal; }
  main { padding:12px 14px 48px; } h1 { font-size:1.45rem; } h2 { font-size:1.2rem; }
  .claims td:first-child { min-width:8em; }
  .overview thead { display:none; } .overview tr, .overview td { display:block; border:0; padding:.15em 0; }
  .overview tr { border-bottom:1px solid var(--line); padding:.6em 0; } }
@media print { .scroll { overflow:visible; } h2 { break-after:avoid; } figure, tr { break-inside:avoid; } }
"""
