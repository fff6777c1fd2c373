"""Builds the files of a release into dist/: the sdist, the wheel, and a bill of materials.

`make dist` runs this program. The bill (CycloneDX) lists all packages of an installation of the wheel on this
machine, with the versions of constraints.txt.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent


def build(target: Path) -> Path:
    """Build the sdist, and the wheel from the sdist, into a directory. Return the path of the wheel."""
    options = ["--no-isolation", "--outdir", str(target)]
    subprocess.run([sys.executable, "-m", "build", *options, str(ROOT)], check=True, stdout=sys.stderr)
    (wheel,) = target.glob("*.whl")
    return wheel


def pip(*arguments: str) -> None:
    """Run pip with the versions of constraints.txt."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    subprocess.run([*command, "-c", str(ROOT / "constraints.txt")], check=True, stdout=sys.stderr)


def install(wheel: Path | str, environment: Path) -> Path:
    """Install a wheel or another requirement into a new environment. Return its Python interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    pip("--python", str(environment), "install", str(wheel))
    return environment / "bin" / "python"


def write_bill(wheel: Path, python: Path) -> Path:
    """Write the bill of materials of the environment of a Python interpreter. Return the bill's path."""
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible", str(python)]
    bill = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    (this,) = (each for each in bill["components"] if each["name"] == "cometmq")
    bill["components"].remove(this)
    del this["externalReferences"]  # the path of the wheel on this machine
    bill["metadata"]["component"] = {**this, "purl": f"pkg:pypi/cometmq@{this['version']}"}
    path = wheel.parent / f"cometmq-{this['version']}.cdx.json"
    path.write_text(json.dumps(bill, indent=1) + "\n", encoding="utf-8")
    return path


def main() -> None:
    target = ROOT / "dist"
    shutil.rmtree(target, ignore_errors=True)
    wheel = build(target)
    with tempfile.TemporaryDirectory(prefix="cometmq-dist-") as directory:
        write_bill(wheel, install(wheel, Path(directory) / "venv"))
    sys.stdout.writelines(f"{path}\n" for path in sorted(target.iterdir()))


if __name__ == "__main__":
    main()
