"""The report in a real browser: no errors, every figure drawn, nothing wider than the page."""

import html
import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

import chromium
from bln.experiments import report
from report_runs import everything, like_authors, summary

FLAGS = (*chromium.FLAGS, "--enable-logging=stderr", "--virtual-time-budget=10000", "--window-size=1400,1000")

LISTEN = """<script>
const errors = [];
addEventListener("error", e => errors.push(String(e.message || e.target.outerHTML)), true);
addEventListener("unhandledrejection", e => errors.push(String(e.reason)));
console.error = console.warn = (...words) => errors.push(words.join(" "));
</script>"""
MEASURE = """<script>
addEventListener("load", () => {
  const root = document.documentElement;
  const figures = [...document.querySelectorAll("figure svg")].map(svg => {
    const box = svg.getBoundingClientRect(), ink = svg.getBBox();
    return {name: svg.id, label: svg.getAttribute("aria-label"), width: box.width, height: box.height,
            ink: Math.min(ink.width, ink.height), parts: svg.querySelectorAll("path, use").length};
  });
  const text = document.querySelector("figure svg [style*='--c1f2328']");
  parent.postMessage({errors, figures, inner: innerWidth, scroll: Math.max(root.scrollWidth, document.body.scrollWidth),
    boxes: [...document.querySelectorAll(".scroll")].map(box => box.getBoundingClientRect().right),
    back: getComputedStyle(document.body).backgroundColor, ink: getComputedStyle(document.body).color,
    figureInk: text && [getComputedStyle(text).fill, getComputedStyle(text).stroke]}, "*");
});
</script>"""
FRAME = """<!DOCTYPE html><title>frame</title><body style="margin:0"><pre></pre>
<script>addEventListener("message", e => document.querySelector("pre").textContent = JSON.stringify(e.data));</script>
<iframe src="{page}" style="width:{width}px;height:900px;border:0"></iframe>"""


def opened(page: str, folder: Path, width: int, *flags: str):
    """What a browser says about a page in a frame of this width: its own windows are never narrower than 500."""
    watched = page.replace("<head>", "<head>" + LISTEN, 1).replace("</body>", MEASURE + "</body>", 1)
    (folder / "watched.html").write_text(watched, "utf-8")
    (folder / "frame.html").write_text(FRAME.format(page="watched.html", width=width), "utf-8")
    profile = folder / f"profile-{len(list(folder.glob('profile-*')))}"
    command = [
        chromium.executable(),
        *FLAGS,
        *flags,
        f"--user-data-dir={profile}",
        "--dump-dom",
        (folder / "frame.html").as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r"<pre>(.*?)</pre>", done.stdout, re.DOTALL)
    assert found, f"the browser did not show the page: {done.stderr[-2000:]}"
    assert found[1], f"the page did not load: {done.stderr[-2000:]}"
    result = json.loads(html.unescape(found[1]))
    result["console"] = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return result


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    rng = np.random.default_rng(0)
    return report.write(summary(everything(rng, 3)), tmp_path_factory.mktemp("report")).read_text("utf-8")


@pytest.mark.parametrize("width", [375, 1280])
def test_shows_every_figure_without_errors_and_fits(page, tmp_path, width):
    seen = opened(page, tmp_path, width)
    assert seen["inner"] == width
    assert (seen["errors"], seen["console"]) == ([], [])
    assert seen["scroll"] <= width
    assert max(seen["boxes"]) <= width
    assert len(seen["figures"]) == page.count("<figure>") == 14
    for figure in seen["figures"]:
        assert min(figure["width"], figure["height"], figure["ink"]) > 100, figure["name"]
        assert figure["parts"] > 30, figure["name"]
        assert figure["label"], figure["name"]


def test_a_partial_report_fits_a_phone(tmp_path):
    runs = like_authors(np.random.default_rng(1), 1, task="rnn", batch_size=1)
    text = report.write(summary(runs, machines=["x" * 200]), tmp_path).read_text("utf-8")
    seen = opened(text, tmp_path, 375)
    assert (seen["errors"], seen["console"]) == ([], [])
    assert seen["scroll"] <= 375


def brightness(colour):
    return sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 3


def test_page_and_figures_follow_the_colour_scheme(page, tmp_path):
    """Chromium's setting: 0 is dark, 1 is light."""
    for scheme, dark in ((0, True), (1, False)):
        seen = opened(page, tmp_path, 1280, f"--blink-settings=preferredColorScheme={scheme}")
        assert (brightness(seen["back"]) < 60) == dark
        assert (brightness(seen["ink"]) > 180) == dark
        drawn = [colour for colour in seen["figureInk"] if colour.startswith("rgb")]
        assert drawn
        assert all((brightness(colour) > 180) == dark for colour in drawn)


def test_a_broken_page_is_noticed(page, tmp_path):
    """What the tests above rely on: errors, missing resources and overflow are seen."""
    broken = page.replace("<main>", '<main><img src="gone.png"><div style="width:2000px">wide</div>', 1)
    broken = broken.replace("</main>", "<script>nowhere()</script></main>", 1)
    seen = opened(broken, tmp_path, 375)
    assert any("gone.png" in error for error in seen["errors"])
    assert any("nowhere" in error for error in seen["errors"])
    assert seen["console"]
    assert seen["scroll"] >= 2000
