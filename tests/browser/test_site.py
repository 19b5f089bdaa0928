"""The documentation in a real browser: built, served over HTTP, searched, and looked at on a desktop and a phone.

``BLN_PICTURES`` names a folder that gets a picture of every page.
"""

import os
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from chromium import opened

ROOT = Path(__file__).parents[2]
PAGES = sorted(path.stem for path in (ROOT / "docs").glob("*.md"))
FORMULAS = {"index": 1, "method": 3}


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The address of the site, built strictly and served."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with opened(tmp_path_factory.mktemp("browser")) as page:
        yield page


def address(site, name):
    return site if name == "index" else f"{site}{name}/"


@pytest.mark.parametrize("width", [375, 1280])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_drawn_without_errors_and_fits(site, page, name, width):
    page.problems.clear()
    page.requests.clear()
    page.resize(width)
    page.open(address(site, name))
    page.wait("[...document.images].every(image => image.complete)")
    if folder := os.environ.get("BLN_PICTURES"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.picture(Path(folder) / f"{name}-{width}.png")
    assert page.do("[...document.images].filter(image => !image.naturalWidth).map(image => image.src)") == []
    assert page.do("document.documentElement.scrollWidth") <= width
    assert page.do("[...document.querySelectorAll('.math svg')].every(one => one.getBoundingClientRect().height > 10)")
    assert page.do("document.querySelectorAll('.math').length") == FORMULAS.get(name, 0)
    assert page.problems == []
    assert [url for url in page.requests if not url.startswith((site, "data:", "blob:"))] == []


def test_the_search_box_finds_a_word_and_leads_to_it(site, page):
    page.problems.clear()
    page.resize(1280)
    page.open(site)
    page.do("document.querySelector('[data-md-component=search-query]').focus()")
    page.ask("Input.insertText", text="calibrate")
    found = page.wait(
        "[...document.querySelectorAll('.md-search-result__link')]"
        ".filter(link => link.textContent.includes('calibrate')).map(link => link.href)"
    )
    assert any("/search/" in link or "/choosing/" in link for link in found)
    page.open(found[0])
    assert "calibrate" in page.do("document.querySelector('article').textContent")
    assert page.problems == []


def test_a_broken_page_is_noticed(site, page):
    """What the tests above rely on: errors, missing files, requests elsewhere and overflow are seen."""
    page.problems.clear()
    page.resize(375)
    page.open(site)
    page.do("document.body.insertAdjacentHTML('beforeend', '<img src=gone.png><div style=width:2000px>wide</div>')")
    page.do("setTimeout(() => nowhere()); console.error('said')")
    page.wait("[...document.images].every(image => image.complete)")
    assert page.do("[...document.images].filter(image => !image.naturalWidth).length") == 1
    assert page.do("document.documentElement.scrollWidth") >= 2000
    for word in ("gone.png", "nowhere", "said"):
        assert any(word in problem for problem in page.problems), word
