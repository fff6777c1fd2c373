"""`cometmq conf`: the configuration files of the package."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from cometmq.cli.lazy import CometGroup
from cometmq.cli.options import HELP
from cometmq.settings import PACKAGED_CONF
from cometmq.text import did_you_mean


@click.group(cls=CometGroup, context_settings=HELP)
def conf() -> None:
    """List, show and copy the configuration files of the package: cluster modes, settings, deployments."""


@conf.command("list", context_settings=HELP)
def list_files() -> None:
    """List the files and directories by name, each directory with its files."""
    for path in sorted(Path(PACKAGED_CONF).iterdir()):
        inside = "  ".join(sorted(file.name for file in path.iterdir())) if path.is_dir() else ""
        click.echo(f"{path.name:16}{inside}".rstrip())


@conf.command(context_settings=HELP)
@click.argument("name")
def show(name: str) -> None:
    """Print the file NAME, or all files of the directory NAME."""
    files = _files(name)
    for number, file in enumerate(files):
        if len(files) > 1:
            click.echo(f"{'' if number == 0 else chr(10)}==> {file.relative_to(PACKAGED_CONF)} <==")
        click.echo(file.read_bytes(), nl=False)


@conf.command(context_settings=HELP)
@click.argument("name")
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
def copy(name: str, directory: Path) -> None:
    """Copy the file NAME, or all files of the directory NAME, into DIR. Existing files are not replaced."""
    files = _files(name)
    if there := [file.name for file in files if (directory / file.name).exists()]:
        raise click.ClickException(f"{directory} already contains {', '.join(there)}; nothing was copied")
    directory.mkdir(parents=True, exist_ok=True)
    for file in files:
        shutil.copyfile(file, directory / file.name)
        click.echo(directory / file.name)


def _files(name: str) -> list[Path]:
    """Return the files under a name in `conf/`, sorted. Raises ClickException for an unknown name."""
    root = Path(PACKAGED_CONF)
    known = {str(path.relative_to(root)): path for path in root.rglob("*")}
    found = known.get(name.rstrip("/"))
    if found is None:
        raise click.ClickException(
            f"The package has no {name!r}.{did_you_mean(name, known)} `cometmq conf list` lists them."
        )
    return [found] if found.is_file() else sorted(path for path in found.rglob("*") if path.is_file())
