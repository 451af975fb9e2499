"""Opens a report in headless Chromium, when one is installed: errors of the page, its width, and a picture.

    python -m tests.browser REPORT.html OUT_DIRECTORY

Writes report_1280.png and report_400.png, to be looked at. Fails if the page reports an error or is wider than its
window.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

WIDTHS = (1280, 400)
PROBE = (
    "<script>window.onerror=(m)=>{document.title='ERROR '+m};"
    "window.onload=()=>{const e=document.documentElement;"
    "document.body.setAttribute('data-seen', e.scrollWidth+'/'+e.clientWidth+' '+document.title)}</script></body>"
)
FRAME = (
    "<body style='margin:0'><iframe id=f src=probed.html style='STYLE'></iframe><script>onload=()=>setTimeout(()=>{"
    "document.body.setAttribute('data-seen',document.getElementById('f').contentDocument.body.getAttribute('data-seen'))"
    "},300)</script>"
)
OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage",
    "--allow-file-access-from-files", "--virtual-time-budget=4000",
)  # fmt: skip


def chromium() -> str | None:
    """The browser's path, None if there is none."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def look(page: Path, out: Path, *, height: int = 3000) -> dict[int, tuple[int, int, str]]:
    """By width of the window: (width of the content, width of the window, title) and, in `out`, a picture."""
    browser, found = chromium(), {}
    assert browser is not None
    for width in WIDTHS:
        with tempfile.TemporaryDirectory() as profile:
            folder = Path(profile)
            (folder / "probed.html").write_text(page.read_text().replace("</body>", PROBE))
            # In a frame of the wanted width: the window of a headless Chromium is never narrower than 500.
            style = f"border:0;width:{width}px;height:{height}px"
            frame = folder / "frame.html"
            frame.write_text(FRAME.replace("STYLE", style))
            options = [*OPTIONS, f"--user-data-dir={folder / 'profile'}", f"--window-size={max(width, 500)},{height}"]
            run = partial(
                subprocess.run,
                check=True,
                capture_output=True,
                text=True,
                timeout=120,
                env={**os.environ, "HOME": profile},
            )
            run([browser, *options, f"--screenshot={out / f'report_{width}.png'}", str(frame)])
            dump = run([browser, *options, "--dump-dom", str(frame)])
            seen = re.search(r'data-seen="(\d+)/(\d+) ([^"]*)"', dump.stdout)
            assert seen is not None, dump.stderr[-2000:]
            found[width] = (int(seen[1]), int(seen[2]), seen[3])
    return found


def main() -> None:
    page, out = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    out.mkdir(parents=True, exist_ok=True)
    for width, (content, window, title) in look(page, out).items():
        print(f"{width}: content {content} px in {window} px, title {title!r}")
        assert content <= window and not title.startswith("ERROR")


if __name__ == "__main__":
    main()
