"""The report is legible in a real browser: wide, on a phone, in light and in dark; and it says what is pointed at."""

import dataclasses
import json
import re
import subprocess
from datetime import timedelta
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from areal_async.monitor.report.page import render
from tests.unit.cli.reports import report
from tools.setup_browser import find_browser

LISTEN = "<head><script>window.errors = []; addEventListener('error', event => errors.push(event.message));</script>"
MEASURE = """
<script>
{
const box = one => one.getBoundingClientRect();
const meet = (from, to, start, end) => from < end - 0.5 && start < to - 0.5;
const hits = (a, b) => meet(a.left, a.right, b.left, b.right) && meet(a.top, a.bottom, b.top, b.bottom);
const overlaps = [];
document.querySelectorAll("svg.chart").forEach(svg => {
  const texts = [...svg.querySelectorAll("text")];
  texts.forEach((one, k) => texts.slice(k + 1).forEach(other => {
    if (hits(box(one), box(other))) overlaps.push([svg.getAttribute("aria-label"), one.textContent, other.textContent]);
  }));
});
const rgb = text => text.match(/[0-9.]+/g).slice(0, 3).map(Number);
const light = text => {
  const parts = rgb(text).map(v => v / 255).map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
  return .2126 * parts[0] + .7152 * parts[1] + .0722 * parts[2];
};
const contrast = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + .05) / (y + .05); };
const card = getComputedStyle(document.querySelector(".card")).backgroundColor;
const contrasts = {};
for (const [name, property] of [[".tick", "fill"], ["h3", "color"], [".note", "color"], [".tokens .g", "color"],
  [".tokens .t", "color"], [".l1", "stroke"], [".l2", "stroke"]])
  contrasts[name] = contrast(getComputedStyle(document.querySelector(name))[property], card);
const svg = document.querySelector("svg.chart"), area = box(svg);
svg.dispatchEvent(new PointerEvent("pointermove", {clientX: area.right - 2, clientY: area.top + 20}));
const tip = document.getElementById("tip"), pointed = tip.innerText, tipBox = box(tip);
svg.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowLeft"}));
const before = tip.innerText;
svg.dispatchEvent(new Event("pointerleave"));
const measured = document.createElement("pre");
measured.id = "measured";
measured.textContent = JSON.stringify({
  errors, overlaps, contrasts, pointed, before, hacked: window.hacked || 0,
  tipIsInside: tipBox.left >= 0 && tipBox.right <= innerWidth + 0.5,
  tipIsHidden: getComputedStyle(tip).visibility === "hidden",
  width: innerWidth, pageWidth: document.documentElement.scrollWidth,
  numCharts: document.querySelectorAll("svg").length,
  smallest: Math.min(...[...document.querySelectorAll("svg text")].map(one => box(one).height)),
  sticksOut: [...document.querySelectorAll(".card, .tile, details")].filter(one => one.scrollWidth > one.clientWidth + 1
    && getComputedStyle(one).overflowX === "visible").length,
});
document.body.append(measured);
}
</script></body>"""

READ = """
<script>
{
const first = document.querySelector("svg.chart"), card = first.closest(".card"), loss = [...document.querySelectorAll(
  ".card")].find(one => one.dataset.name === "Loss"), sample = document.querySelector("details[id^=lowest]");
sample.open = true;
document.querySelector("details[id^=highest]").open = true;
const table = document.querySelector(".card.wide[data-name=steps]");
table.scrollLeft = 40;
sample.scrollIntoView();
const before = Math.round(sample.getBoundingClientRect().top), scrolled = scrollY, area = first.getBoundingClientRect();
first.dispatchEvent(new PointerEvent("pointermove", {clientX: area.left + area.width / 2, clientY: area.top + 20}));
const told = tip.innerText, settings = document.getElementById("settings");
setTimeout(() => {
  const now = document.querySelector("svg.chart"), measured = document.createElement("pre");
  measured.id = "measured";
  measured.textContent = JSON.stringify({
    errors, told, tells: tip.innerText, tipIsShown: tip.style.visibility, isDrawnAnew: now !== first,
    step: document.querySelector(".about").innerText, isSettingsKept: settings === document.getElementById("settings"),
    isOpen: sample.open && sample.isConnected, moved: Math.round(sample.getBoundingClientRect().top) - before,
    scrolled, names: [...document.querySelectorAll("details")].map(one => one.id), numFrames: frames.length,
    tableLeft: document.querySelector(".card.wide[data-name=steps]").scrollLeft,
    hasCross: getComputedStyle(now.querySelector(".cross")).visibility, charts: document.querySelectorAll("svg").length,
  });
  document.body.append(measured);
}, 4000);
}
</script></body>"""


def _look(tmp_path: Path, *, width: int, is_dark: bool = False) -> tuple[dict[str, Any], Any]:
    """Return what the page measures of itself, and its picture [height, width, 3]."""
    page = render(report()).replace("<details id", "<details open id").replace("</body>", MEASURE)
    (tmp_path / "report.html").write_text(page.replace("<head>", LISTEN, 1), encoding="utf-8")
    size = (f"--window-size={width},1500", f"--screenshot={tmp_path / 'shot.png'}")
    seen = _browse(tmp_path, f"--blink-settings=preferredColorScheme={0 if is_dark else 1}", *size)
    return seen, np.asarray(Image.open(tmp_path / "shot.png")) / 255


def _browse(tmp_path: Path, *options: str) -> dict[str, Any]:
    """Return what the page measures of itself."""
    browser = find_browser()
    assert browser is not None, "no browser on PATH; python tools/setup_browser.py installs one"
    done = subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=5000",
            f"--user-data-dir={tmp_path / 'profile'}", *options, "--dump-dom", f"file://{tmp_path / 'report.html'}",
        ],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    found = re.search(r'<pre id="measured">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, f"{done.stderr}\n{done.stdout[-2000:]}"
    measured: dict[str, Any] = json.loads(unescape(found[1]))
    return measured


@pytest.mark.parametrize(("width", "is_dark"), [(1280, False), (1280, True), (390, False)])
def test_the_report_is_legible_and_answers_the_pointer(width: int, is_dark: bool, tmp_path: Path) -> None:
    seen, picture = _look(tmp_path, width=width, is_dark=is_dark)

    assert seen["errors"] == []
    assert seen["hacked"] == 0
    assert seen["overlaps"] == []
    assert seen["width"] == width
    assert seen["pageWidth"] <= width, "the page is to be scrolled down only"
    assert seen["sticksOut"] == 0
    assert seen["smallest"] >= 9, "pixels of the smallest text in a chart"
    for name, contrast in seen["contrasts"].items():
        assert contrast >= (3 if name.startswith(".l") else 4.5), f"{name}: {contrast}"
    assert re.search(r"step 130\s+training\s+0.961 reward", seen["pointed"])
    assert re.search(r"step 129\s+training", seen["before"])
    assert seen["tipIsInside"]
    assert seen["tipIsHidden"]
    assert seen["numCharts"] >= 14
    shade = float(np.median(picture[..., :3]))
    assert shade < 0.2 if is_dark else shade > 0.9
    blue = np.array([0x5B, 0x9D, 0xF0] if is_dark else [0x2A, 0x78, 0xD6]) / 255
    assert (np.abs(picture[..., :3] - blue).max(axis=-1) < 0.02).sum() > 500, "pixels of the first line's colour"


def test_a_watched_page_takes_in_what_is_new_and_the_reader_stays_where_he_is(tmp_path: Path) -> None:
    """The file is another one when the page looks again; here it lies beside it, where its ``base`` points."""
    before, after = report(num_steps=129), report(num_steps=130)
    after = dataclasses.replace(after, written_at=after.written_at + timedelta(seconds=1), samples=after.samples[1:])
    page = render(before, refresh_s=0.5).replace("</body>", READ)
    page = page.replace("<head>", LISTEN + '<base href="after.html">', 1)
    (tmp_path / "report.html").write_text(page, encoding="utf-8")
    (tmp_path / "after.html").write_text(render(after, refresh_s=0.5), encoding="utf-8")

    seen = _browse(tmp_path, "--window-size=390,800")

    assert seen["errors"] == []
    assert seen["step"].startswith("step 130 of 200")
    assert seen["isDrawnAnew"]
    assert (seen["tipIsShown"], seen["hasCross"]) == ("visible", "visible")
    assert seen["told"].split()[:2] == seen["tells"].split()[:2], "the step that is pointed at"
    assert seen["isOpen"], "a sample that is read, though it is no sample any more"
    assert seen["names"][:3] == ["lowest-0-17-0.0", "median-0-17-0.1", "highest-0-17-0.2"]
    assert seen["isSettingsKept"], "what has not changed is not touched"
    assert seen["scrolled"] > 0
    assert abs(seen["moved"]) <= 1, "pixels"
    assert seen["tableLeft"] == 40
    assert seen["numFrames"] == 1


def test_a_watched_page_asks_its_own_file(tmp_path: Path) -> None:
    """A browser loads a page into a frame of itself only under another address."""
    wait = """<script>shown = "before";
    setTimeout(() => { const one = document.createElement("pre"); one.id = "measured";
      one.textContent = JSON.stringify({errors, shown}); document.body.append(one); }, 4000);</script></body>"""
    page = render(report(), refresh_s=0.5).replace("</body>", wait).replace("<head>", LISTEN, 1)
    (tmp_path / "report.html").write_text(page, encoding="utf-8")

    assert _browse(tmp_path) == {"errors": [], "shown": report().written_at.isoformat()}
