"""Programs as users have them: application servers and queue workers, started by their own commands, always ended.

The application is text given to `Program`, written to a file of its own; its standard output and error go to another.
"""

from __future__ import annotations

import http.client
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn, Self

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 30.0  # seconds for what a program does at once; a program that takes longer hangs


def command(name: str) -> str:
    """The path of an installed command; calls `missing` if it is not installed."""
    found = shutil.which(name, path=os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")]))
    return missing(name) if found is None else found


def needs(module: str) -> None:
    """Require another package, which the program imports; calls `missing` if it is not installed."""
    if importlib.util.find_spec(module) is None:
        missing(module)


def missing(what: str) -> NoReturn:
    """Skip the test, with the reason; fail it where CI is set."""
    why = f"{what} is not installed: it comes with fastlock[test]"
    pytest.fail(why) if os.environ.get("CI") else pytest.skip(why)


class Program:
    """A process that runs `application`, a module of that name in `folder`; `url`: its server, in the environment."""

    def __init__(self, folder: Path, url: str, application: str, arguments: list[str]) -> None:
        (folder / "application.py").write_text(application)
        self.port = _free_port()
        self._log = folder / "log"
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])  # this tree, whatever is installed
        environment = {**os.environ, "PYTHONPATH": paths, "SERVER": url, "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": ""}
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [argument.replace("PORT", str(self.port)) for argument in arguments],
                cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(1)
        except subprocess.TimeoutExpired:  # Celery takes its time; or the program hangs
            os.killpg(self._process.pid, 9)
            self._process.wait()

    @property
    def log(self) -> str:
        """The program's output so far."""
        return self._log.read_text(errors="replace")

    def get(self, path: str = "/") -> tuple[int, str]:
        """Send a request as soon as the program listens: status and body. AssertionError when it takes too long."""
        until = time.monotonic() + LIMIT
        while True:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT)
                connection.request("GET", path)
                answer = connection.getresponse()
                return answer.status, answer.read().decode()
            except ConnectionRefusedError:
                assert time.monotonic() < until and self._process.poll() is None, self.log
                time.sleep(0.02)
            except (TimeoutError, ConnectionError, http.client.HTTPException) as error:
                raise AssertionError(f"no answer to {path}: {error!r}\n{self.log}") from None
            finally:
                connection.close()

    def many(self, path: str, requests: int, callers: int = 8) -> list[tuple[int, str]]:
        """Send so many requests, from so many threads."""
        self.get("/up")
        answers: list[Any] = []
        left = iter(range(requests))

        def ask() -> None:
            for _ in left:
                try:
                    answers.append(self.get(path))
                except AssertionError as error:
                    answers.append(error)
                    return

        threads = [threading.Thread(target=ask) for _ in range(callers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for answer in answers:
            if isinstance(answer, AssertionError):
                raise answer
        return answers


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])
