"""An S3 server as a process on 127.0.0.1: SeaweedFS, whose conditional puts are atomic."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from pyarrow import fs
from tests.ports import free_port

KEY, SECRET = "an-access-key", "a/secret+key"
BUCKET = "bucket"
_PORTS = [f"-{name}.port{kind}" for name in ("s3", "master", "filer", "volume") for kind in ("", ".grpc")]
_OFF = ["-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.iam=false", "-volume.max=20"]
_READY_S = 60.0


@dataclass(frozen=True)
class S3:
    """A running server."""

    port: int

    def uri(self, path: str) -> str:
        """Return the URI of a path in the bucket with all parameters that a client needs."""
        user = f"{quote(KEY, '')}:{quote(SECRET, '')}"
        return f"s3://{user}@{BUCKET}/{path}?scheme=http&endpoint_override={self.host}"

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """Return the parameters for a client whose URI contains only bucket and path."""
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": f"http://{self.host}",
            "AWS_REGION": "us-east-1",
        }

    @property
    def files(self) -> fs.FileSystem:
        return fs.S3FileSystem(
            access_key=KEY, secret_key=SECRET, scheme="http", endpoint_override=self.host,
            region="us-east-1", allow_bucket_creation=True,
        )  # fmt: skip

    def paths(self, below: str, ending: str = "") -> list[str]:
        """Return the objects below a path of the bucket, relative to that path."""
        base = f"{BUCKET}/{below}"
        found = self.files.get_file_info(fs.FileSelector(base, recursive=True, allow_not_found=True))
        names = [info.path.removeprefix(base + "/") for info in found if info.is_file]
        return sorted(name for name in names if name.endswith(ending))


@contextmanager
def s3_server(scratch: Path) -> Iterator[S3]:
    with ExitStack() as stack:
        for _ in range(3):  # another program may take a port in the meantime
            server = stack.enter_context(_started(scratch))
            if server is not None:
                yield server
                return
    raise AssertionError((scratch / "log").read_text()[-2000:])


@contextmanager
def _started(scratch: Path) -> Iterator[S3 | None]:
    identity = {"name": "t", "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": ["Admin"]}
    (scratch / "s3.json").write_text(json.dumps({"identities": [identity]}))
    weed = str(Path(sys.executable).with_name("weed"))
    ports = {option: free_port() for option in _PORTS}
    options = [f"{option}={port}" for option, port in ports.items()]
    place = [f"-dir={scratch}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", f"-s3.config={scratch}/s3.json"]
    with (scratch / "log").open("wb") as log:
        process = subprocess.Popen([weed, "-logtostderr", "server", *place, *_OFF, *options], stderr=log)
    try:
        server = S3(ports["-s3.port"])
        yield server if _ready(process, server) else None
    finally:
        process.kill()  # a clean stop would take 15 s
        process.wait()


def _ready(process: subprocess.Popen[bytes], server: S3) -> bool:
    deadline = time.monotonic() + _READY_S
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", server.port), 1).close()
            server.files.create_dir(BUCKET)
            return True
        time.sleep(0.1)
    return False
