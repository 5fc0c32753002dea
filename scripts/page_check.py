"""The pages and pictures of a run as Chromium draws them: at 400 and 1,280 pixels, light and dark.

python scripts/page_check.py report.html run.svg    # exit 1: a text is clipped, or a contrast is too low

Needs Debian's `chromium` (apt install chromium). Contrast is computed by WCAG 2: text 4.5:1 to what is behind it, marks
of lanes and curves 3:1.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

WIDTHS = (400, 1280)
TEXT_CONTRAST, MARK_CONTRAST = 4.5, 3.0
MARKS = ".kind-F, .kind-R, .kind-B, polyline.c1, polyline.c2, polyline.c3, polyline.c4"
_PROBE = """
const frame = document.getElementById("frame");
const numbers = text => (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
const luminance = ([r, g, b]) => { const f = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  return 0.2126 * f(r) + 0.7152 * f(g) + 0.0722 * f(b); };
const contrast = (a, b) => { const [x, y] = [luminance(a), luminance(b)].sort((p, q) => q - p);
  return (x + 0.05) / (y + 0.05); };
function behind(node, style) {
  for (let at = node; at && at.nodeType === 1; at = at.parentNode) {
    const back = numbers(style(at).backgroundColor);
    if (back.length < 4 || back[3] > 0) return back;
  }
  return null;
}
function probe() {
  const page = frame.contentDocument, view = frame.contentWindow, found = [];
  const style = node => view.getComputedStyle(node), svg = page.querySelector("svg .back");
  const ground = node => behind(node, style) || (svg ? numbers(style(svg).fill) : DARK ? [0, 0, 0] : [255, 255, 255]);
  const width = page.documentElement.clientWidth;
  for (const node of page.querySelectorAll("body *, svg *")) {
    const own = [...node.childNodes].some(child => child.nodeType === 3 && child.textContent.trim());
    const name = node.tagName.toLowerCase(), box = node.getBoundingClientRect();
    if (!own || ["style", "title", "script"].includes(name) || !box.width) continue;
    const text = node.textContent.trim().slice(0, 40);
    const inner = node.closest("svg");
    if (inner) {
      const edge = inner.getBoundingClientRect();
      if (box.left < edge.left - 1 || box.right > edge.right + 1) found.push(`clipped: ${text}`);
    } else if (box.right > width + 1 || node.scrollWidth > node.clientWidth + 1 && style(node).overflow !== "visible")
      found.push(`clipped: ${text}`);
    const css = node.getAttribute("class") || "";
    const colour = numbers(inner ? style(node).fill : style(node).color);
    const back = css.includes("number") && node.previousElementSibling
      ? numbers(style(node.previousElementSibling).fill) : ground(node);
    if (contrast(colour, back) < TEXT) found.push(`contrast ${contrast(colour, back).toFixed(1)}: ${text}`);
  }
  const seen = new Set();
  for (const node of page.querySelectorAll(MARKS)) {
    const css = node.getAttribute("class");
    if (seen.has(css)) continue;
    seen.add(css);
    const paint = node.tagName === "polyline" ? style(node).stroke : style(node).fill;
    const ratio = contrast(numbers(paint), ground(node));
    if (ratio < MARK) found.push(`contrast ${ratio.toFixed(1)}: mark ${css}`);
  }
  if (page.documentElement.scrollWidth > width + 1 && !page.querySelector("svg .back"))
    found.push("the page scrolls sideways");
  const out = document.createElement("pre");
  out.id = "found"; out.textContent = JSON.stringify(found); document.body.append(out);
}
frame.onload = probe;
"""


def chromium() -> str | None:
    """The program, if it is here."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def faults_of(page: Path) -> list[str]:
    """What is wrong with a page or picture, with width and colours; empty: nothing."""
    return [
        f"{page.name} at {width} pixels, {'dark' if dark else 'light'}: {fault}"
        for width in WIDTHS
        for dark in (False, True)
        for fault in _faults(page, width, dark=dark)
    ]


def _faults(page: Path, width: int, *, dark: bool) -> list[str]:
    program = chromium()
    assert program is not None, "apt install chromium"
    constants = (
        f"const DARK = {json.dumps(dark)}, TEXT = {TEXT_CONTRAST}, MARK = {MARK_CONTRAST}, MARKS = {json.dumps(MARKS)};"
    )
    frame = (
        f'<iframe id="frame" src="{page.resolve().as_uri()}" style="width:{width}px;height:2000px;border:0"></iframe>'
    )
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder) / "probe.html"
        probe.write_text(
            f"<!doctype html><meta charset=utf-8><body style='margin:0'>{frame}<script>{constants}{_PROBE}</script>"
        )
        command = [
            *(program, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"),
            *(f"--user-data-dir={folder}/profile", "--virtual-time-budget=5000", "--window-size=1400,2100"),
            *(["--blink-settings=preferredColorScheme=0"] if dark else ["--blink-settings=preferredColorScheme=1"]),
            *("--dump-dom", probe.as_uri()),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, f"the page was not probed: {done.stdout[-500:]}{done.stderr[-500:]}"
    faults: list[str] = json.loads(html.unescape(found[1]))
    return faults


def main() -> None:
    pages = [Path(name) for name in sys.argv[1:]]
    if not pages:
        sys.exit(__doc__)
    faults = [fault for page in pages for fault in faults_of(page)]
    print("\n".join(faults) or f"good: {', '.join(page.name for page in pages)}")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
