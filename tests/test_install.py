"""The wheel and the sdist, and the wheel in empty environments: its commands, types and pytest plugin."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import textwrap
import tomllib
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import make_dist
import pytest
from cyclonedx.schema import SchemaVersion
from packaging.requirements import Requirement
from tests.typing.test_user_code import type_check

from cometmq import __version__
from cometmq.testing import ServerProcess

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
INFO = f"cometmq-{__version__}.dist-info"
COMMANDS = ("cometmq", "mqnamesrv", "mqbroker", "mqadmin", "mqshutdown")
READY_S = 30
OTHER_PYTHONS = [
    each.rpartition(" ")[2]
    for each in PROJECT["classifiers"]
    if re.search(r":: 3\.\d+$", each) and not each.endswith(f" 3.{sys.version_info.minor}")
]
"""The other versions of Python that the package claims to support."""
pytestmark = [
    pytest.mark.slow("builds the package and installs it into empty environments"),
    pytest.mark.timeout(600),  # including the fixture `venv`
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, beside the sdist that it was built from."""
    return make_dist.build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def venv(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment that contains only this project, installed as a user would."""
    path = tmp_path_factory.mktemp("install") / "venv"
    make_dist.install(wheel, path)
    return path


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Environment variables that hide this checkout and the user's servers."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "NAMESRV"))}
    return {**clean, "HOME": str(tmp_path), "COMETMQ_RUN_DIR": str(tmp_path / "run")}


def run(venv: Path, env: dict[str, str], command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run one of the installed commands outside the checkout."""
    return subprocess.run(
        [str(venv / "bin" / command), *arguments],
        capture_output=True,
        text=True,
        env=env,
        cwd=env["HOME"],
        timeout=60,
    )


def distributions(venv: Path, env: dict[str, str]) -> dict[str, str]:
    """Return the versions of all packages of an environment by their names in lower case."""
    code = "import importlib.metadata as m; [print(each.name, each.version) for each in m.distributions()]"
    lines = run(venv, env, "python", "-c", code).stdout.lower().splitlines()
    return dict(line.split() for line in lines)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_shows_its_help(venv: Path, env: dict[str, str], command: str) -> None:
    done = run(venv, env, command, "--help")

    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("command", COMMANDS[1:])
def test_each_script_can_be_given_to_sh_and_to_python(venv: Path, env: dict[str, str], command: str) -> None:
    wanted = run(venv, env, command, "--help").stdout
    script, link = venv / "bin" / command, Path(env["HOME"], "a link")
    link.symlink_to(script)
    python = str(venv / "bin" / "python")
    for words in (("/bin/sh", script), (python, script), (link,), ("/bin/sh", link)):
        done = run(venv, env, *map(str, words), "--help")
        assert (done.returncode, done.stdout) == (0, wanted), done.stderr
    assert command in wanted
    assert "cometmq mq" not in wanted


def test_the_base_install_brings_no_spark_and_no_test_tools(venv: Path, env: dict[str, str]) -> None:
    installed = distributions(venv, env).keys()

    assert "cometmq" in installed
    assert installed & {"pyspark", "pyarrow", "pytest", "hypothesis", "mypy", "tpchgen-cli"} == set()


def test_the_packages_page_has_no_link_into_the_repository_alone(venv: Path, env: dict[str, str]) -> None:
    code = "import importlib.metadata as m; print(m.metadata('cometmq').get_payload())"
    page = run(venv, env, "python", "-c", code).stdout

    assert page.startswith("# CometMQ\n")
    assert "- docs/server.md: running name servers and brokers" in page
    links = re.findall(r"\]\(([^)]*)\)", page)
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


def test_every_file_of_the_package_is_installed(venv: Path) -> None:
    def files(package: Path) -> set[str]:
        found = (each for each in package.rglob("*") if each.is_file() and "__pycache__" not in each.parts)
        return {str(each.relative_to(package)) for each in found}

    (installed,) = venv.glob("lib/python*/site-packages/cometmq")
    assert files(installed) == files(ROOT / "src" / "cometmq")


def test_the_installed_console_has_its_pages_and_files(venv: Path, env: dict[str, str]) -> None:
    """The packages of the console's extra come from the tests' environment."""
    place = ["-n", "127.0.0.1:1", "--port", "0", "--data", f"{env['HOME']}/console"]
    command = [str(venv / "bin" / "cometmq"), "console", *place]
    libraries = env | {"PYTHONPATH": sysconfig.get_path("purelib")}
    with ServerProcess(command, r"^The console of .* is ready: ", libraries) as process:
        url = process.wait_ready().rpartition(" ")[2].rstrip("/")
        texts = {"/login": "password", "/static/console.css": "{", "/static/console.js": "use strict"}
        for path, text in texts.items():
            with urllib.request.urlopen(url + path, timeout=READY_S) as answer:
                assert text in answer.read().decode(), path


def test_what_needs_an_extra_says_which(venv: Path, env: dict[str, str]) -> None:
    done = run(venv, env, "cometmq", "archive", "orders", "--output", "nowhere")

    assert done.returncode == 1
    assert done.stderr == "cometmq: the pipeline needs Spark: pip install 'cometmq[spark]'\n"


@contextmanager
def standalone(venv: Path, env: dict[str, str]) -> Iterator[str]:
    """Run an installed `cometmq standalone` and yield its name server's address."""
    command = [str(venv / "bin" / "cometmq"), "standalone", "--data", "data", "--namesrv-port", "0"]
    process = subprocess.Popen(
        [*command, "--broker-port", "0"], stdout=subprocess.PIPE, text=True, env=env, cwd=env["HOME"]
    )
    assert process.stdout is not None
    try:
        first = process.stdout.readline()
        found = re.search(r"name server\s+(\S+)", process.stdout.readline())
        assert "ready" in first, first
        assert found is not None
        yield found.group(1)
    finally:
        process.terminate()
        process.stdout.close()
        assert process.wait(READY_S) == 0


def check_a_message_is_carried(venv: Path, env: dict[str, str]) -> None:
    with standalone(venv, env) as cluster:
        sent = run(venv, env, "cometmq", "send", "greetings", "hello", "-n", cluster)
        limits = ("--count", "1", "--timeout", "30")
        taken = run(venv, env, "cometmq", "consume", "greetings", "-n", cluster, *limits)
        listed = run(venv, env, "mqadmin", "topicList", "-n", cluster)

    assert sent.stdout.startswith("SEND_OK "), sent.stderr
    assert taken.stdout.endswith("  hello\n"), taken.stderr
    assert "greetings" in listed.stdout.splitlines()


def test_the_installed_commands_carry_a_message(venv: Path, env: dict[str, str]) -> None:
    assert run(venv, env, "cometmq", "--version").stdout.split()[-1] == __version__
    check_a_message_is_carried(venv, env)


def interpreter(version: str) -> str:
    """Return a Python of another version, which this machine must have: no test is skipped silently."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = sorted(pyenv.glob(f"versions/{version}.*/bin/python"))
    name = str(found[-1]) if found else shutil.which(f"python{version}")
    if name is None:
        pytest.skip(f"there is no Python {version} on this machine; pyproject.toml claims that it works")
    return name


@pytest.mark.parametrize("version", OTHER_PYTHONS)
def test_another_python_installs_the_wheel_by_its_own_pip_and_carries_a_message(
    wheel: Path, env: dict[str, str], tmp_path: Path, version: str
) -> None:
    venv = tmp_path / "venv"
    subprocess.run([interpreter(version), "-m", "venv", str(venv)], check=True, env=env)
    pip = ["-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-compile"]
    constraints = ["-c", str(ROOT / "constraints.txt")]
    subprocess.run([venv / "bin" / "python", *pip, *constraints, str(wheel)], check=True, env=env)

    check_a_message_is_carried(venv, env)


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_has_the_package_its_licence_and_types_and_nothing_else(wheel: Path) -> None:
    names = contents(wheel)
    folders = {"cometmq", "pyspark_cometmq", "pyspark_cometmq_store", INFO, INFO.replace("dist-info", "data")}

    assert {name.partition("/")[0] for name in names} == folders
    assert {"cometmq/py.typed", f"{INFO}/licenses/LICENSE"} <= names.keys()
    assert [name for name in names if re.search(r"(^|/)(tests?|test_\w+\.py|conftest\.py)(/|$)", name)] == []
    metadata = names[f"{INFO}/METADATA"].decode()
    for line in ("License-Expression: Apache-2.0", "License-File: LICENSE", "Requires-Python: >=3.11"):
        assert line in metadata.splitlines()


def test_the_sdist_builds_the_wheel_that_the_repository_builds(wheel: Path, tmp_path: Path) -> None:
    """The fixture's wheel was built from the sdist."""
    options = ["--wheel", "--no-isolation", "--outdir", str(tmp_path)]
    command = [sys.executable, "-m", "build", *options, str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    with tarfile.open(next(wheel.parent.glob("*.tar.gz"))) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}

    assert contents(tmp_path / wheel.name) == contents(wheel)
    assert {"tests/test_install.py", "CHANGELOG.md", "LICENSE", "constraints.txt", "Makefile"} <= names


def check_bill(text: str, version: SchemaVersion) -> dict[str, dict[str, object]]:
    """Check that a bill is valid CycloneDX, is that of this package, and has no path. Return its parts."""
    from cyclonedx.validation.json import JsonStrictValidator

    bill = json.loads(text)
    this = bill["metadata"]["component"]
    assert JsonStrictValidator(version).validate_str(text) is None
    assert (this["purl"], this["version"]) == (f"pkg:pypi/cometmq@{__version__}", __version__)
    assert "Apache-2.0" in json.dumps(this["licenses"])
    assert "file:" not in text
    return {each["name"].lower(): each for each in bill["components"]}


def test_the_wheel_has_a_bill_of_its_requirements(wheel: Path) -> None:
    parts = check_bill(contents(wheel)[f"{INFO}/sboms/cometmq.cdx.json"].decode(), SchemaVersion.V1_7)

    assert parts.keys() == {Requirement(each).name for each in PROJECT["dependencies"]}
    assert parts["msgspec"]["versionRange"] == "vers:pypi/>=0.19"


def test_the_bill_of_a_release_has_each_installed_package_with_version_and_licence(
    wheel: Path, venv: Path, env: dict[str, str]
) -> None:
    parts = check_bill(make_dist.write_bill(wheel, venv / "bin" / "python").read_text(), SchemaVersion.V1_6)
    installed = distributions(venv, env)
    del installed["cometmq"]

    assert {name: part["version"] for name, part in parts.items()} == installed
    assert [name for name, part in parts.items() if not part.get("licenses")] == []
    assert {Requirement(each).name for each in PROJECT["dependencies"]} <= parts.keys()


def test_a_users_program_is_type_checked_against_the_installed_wheel(
    venv: Path, pytestconfig: pytest.Config
) -> None:
    python = f"--python-executable={venv / 'bin' / 'python'}"
    assert type_check(pytestconfig, python).startswith("Success")


def test_the_pytest_plugin_works_with_pytest_alone(venv: Path, env: dict[str, str], tmp_path: Path) -> None:
    """Without pytest, the entry point does no harm: the other tests of this file run without it."""
    make_dist.pip("install", "--no-compile", "--target", str(tmp_path / "lib"), "pytest")
    test = """
        from cometmq import Message, SyncProducer

        def test_a_message_is_stored(cometmq_test_broker, cometmq_broker):
            with SyncProducer("shop", namesrv=cometmq_broker.namesrv) as producer:
                assert producer.send(Message("orders", b"1")).msg_id
    """
    (tmp_path / "test_it.py").write_text(textwrap.dedent(test))
    env = env | {"PYTHONPATH": str(tmp_path / "lib")}
    done = run(venv, env, "python", "-m", "pytest", "-q", "-W", "error", str(tmp_path / "test_it.py"))

    assert "1 passed" in done.stdout, done.stdout + done.stderr
