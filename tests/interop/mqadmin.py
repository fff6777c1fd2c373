"""Apache's mqadmin in one JVM for many commands, since each start takes seconds."""

from __future__ import annotations

import base64
import os
import subprocess
from pathlib import Path

from tests.interop.apache import common_flags, rocketmq_home
from tests.interop.jars import java_tool, server_jars
from tests.interop.processes import HERE, QUICK, Process, ProcessError, compiled


class AdminShell:
    """A runner of Apache's commands of one version; :meth:`run` returns the output of a command."""

    def __init__(self, version: str, directory: Path) -> None:
        self.version = version
        conf = rocketmq_home(directory)
        jars = server_jars(version)
        classes = compiled("admin", sorted((HERE / "java" / "admin").glob("*.java")), jars)
        command = [
            *(java_tool("java"), "-Xmx256m", *QUICK),
            *common_flags(directory),
            f"-Drmq.logback.configurationFile={conf / 'rmq.tools.logback.xml'}",
            *("-cp", os.pathsep.join(map(str, [classes, *jars])), "AdminShell"),
        ]
        self.process = Process(
            f"mqadmin {version}",
            command,
            directory / "mqadmin.log",
            cwd=directory,
            env={"ROCKETMQ_HOME": str(directory)},
            stdout=subprocess.PIPE,
        )

    def run(self, *words: str) -> str:
        stdin, stdout = self.process.popen.stdin, self.process.popen.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write("\t".join(words).encode() + b"\n")
        stdin.flush()
        answer = stdout.readline()
        if not answer:
            raise ProcessError(f"{self.process.name} ended:\n{self.process.log_tail()}")
        return base64.b64decode(answer).decode()

    def stop(self) -> None:
        self.process.kill()
        if self.process.popen.stdout is not None:
            self.process.popen.stdout.close()
