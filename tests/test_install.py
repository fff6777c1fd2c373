"""`pip install .` into an empty environment installs five working commands, without Spark and test tools."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from cometmq.testing import ServerProcess

ROOT = Path(__file__).parents[1]
COMMANDS = ("cometmq", "mqnamesrv", "mqbroker", "mqadmin", "mqshutdown")
READY_S = 30
pytestmark = [
    pytest.mark.slow("downloads and installs the package into an empty environment"),
    pytest.mark.timeout(600),  # including the fixture `venv`
]


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment that contains only this project, installed as a user would."""
    path = tmp_path_factory.mktemp("install") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(path)], check=True, timeout=120)
    pip = [str(path / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    done = subprocess.run(
        [*pip, "install", "-c", str(ROOT / "constraints.txt"), str(ROOT)],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
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
    listed = run(venv, env, "python", "-m", "pip", "list", "--format=freeze").stdout.lower()
    installed = {line.partition("==")[0] for line in listed.splitlines()}

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


@pytest.fixture
def cluster(venv: Path, env: dict[str, str]) -> Iterator[str]:
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


def test_the_installed_commands_carry_a_message(venv: Path, env: dict[str, str], cluster: str) -> None:
    sent = run(venv, env, "cometmq", "send", "greetings", "hello", "-n", cluster)
    limits = ("--count", "1", "--timeout", "30")
    taken = run(venv, env, "cometmq", "consume", "greetings", "-n", cluster, *limits)
    listed = run(venv, env, "mqadmin", "topicList", "-n", cluster)

    assert sent.stdout.startswith("SEND_OK "), sent.stderr
    assert taken.stdout.endswith("  hello\n"), taken.stderr
    assert "greetings" in listed.stdout.splitlines()
