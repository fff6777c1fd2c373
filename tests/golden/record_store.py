"""Record tests/data/store-4.9.7.tar.gz: the files that Apache's broker 4.9.7 writes for a small fixed input.

``python -m tests.golden.record_store``. Commit-log and queue files are cut after their used part;
``lengths.json`` in the archive contains their original lengths.
"""

from __future__ import annotations

import gzip
import io
import json
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.interop import store_input
from tests.interop.apache import ApacheBroker, ApacheNamesrv

TARGET = Path(__file__).parent.parent / "data" / "store-4.9.7.tar.gz"


def write_store(directory: Path) -> Path:
    names = ApacheNamesrv("4.9.7", directory)
    try:
        broker = ApacheBroker("4.9.7", directory, f"127.0.0.1:{names.port}", settings=store_input.TINY)
        store_input.feed(broker.port, numbered=120, batches=3, big=False)
        broker.stop()
    finally:
        names.kill()
    return directory / "store"


def pack(store: Path, cut: tuple[str, ...] = ("commitlog/", "consumequeue/")) -> bytes:
    """Return the archive; files in the `cut` directories are without the zeros at their end."""
    out = io.BytesIO()
    lengths = {}
    with tarfile.open(fileobj=out, mode="w") as archive:
        for path in sorted(store.glob("**/*")):
            if not path.is_file() or path.suffix == ".bak" or path.name == "lock":
                continue
            name, data = str(path.relative_to(store)), path.read_bytes()
            lengths[name] = len(data)
            if name.startswith(cut):
                data = data.rstrip(b"\0") + bytes(20)  # a record may end in zeros, which its length includes
            _add(archive, name, data)
        _add(archive, "lengths.json", json.dumps(lengths, indent=1).encode())
    return gzip.compress(out.getvalue(), 9, mtime=0)


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        TARGET.write_bytes(pack(write_store(Path(directory))))
    sys.stderr.write(f"{TARGET}: {TARGET.stat().st_size} bytes\n")


if __name__ == "__main__":
    main()
