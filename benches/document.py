"""The result of a run for programs: one JSON document, described in benches/README.md.

This file reads the session and measures nothing. The number of the schema rises with every change that could break a
reader; keys may be added under it.
"""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import fastlock
from fastlock import _implementation
from fastlock._cli.console import mask

from .budgets import Verdict
from .schema import SCHEMA
from .session import Measured, Session
from .stats import Row, Sample


def document(session: Session, server: dict[str, str], verdicts: list[Verdict], interrupted: bool) -> dict[str, Any]:
    """The JSON document of a run."""
    return {
        "schema": SCHEMA,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "interrupted": interrupted,
        "command": command(sys.argv),
        "environment": environment(session.versions, server),
        "parameters": session.plan.as_dict(),
        "noise": {
            name: {"spread": width, "rival": measured.subject}
            for name, measured in session.measured.items()
            if (width := measured.noise()) is not None
        },
        "scenarios": {name: scenario(measured) for name, measured in session.measured.items()},
        "skipped": session.skipped,
        "failures": session.failures,
        "notes": session.notes,
        "budgets": [verdict.as_dict() for verdict in verdicts],
    }


def command(argv: list[str]) -> str:
    """The command line as it was typed, with the credentials of URLs masked."""
    return shlex.join(["fastlock", *map(mask, argv[1:])])


def scenario(measured: Measured) -> dict[str, Any]:
    """One scenario as plain values: rows, or the points of a sweep."""
    stage = measured.stage
    rows: dict[str, Any] = {}
    points: list[dict[str, Any]] = []
    for x in measured.samples:
        for rival, found in measured.rows(x).items():
            filled = row(found, measured.samples[x][rival])
            if x is None:
                rows[rival] = filled
            else:
                points.append({"x": x, "rival": rival, "row": filled})
    return {
        "title": stage.title,
        "kind": stage.kind,
        "unit": stage.unit,
        "parameters": dict(stage.parameters),
        "round_trip": measured.round_trip(),
        "rows": rows,
        "points": points,
    }


def row(found: Row, samples: list[Sample]) -> dict[str, Any]:
    """A row as plain values, with the samples that it was made of."""
    return found.as_dict() | {"samples": [sample.as_dict() for sample in samples]}


def environment(versions: Mapping[str, dict[str, str]], server: dict[str, str]) -> dict[str, Any]:
    """Machine, versions and server, without which a number means nothing."""
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "fastlock": fastlock.__version__,
        "build": build(),
        "commit": commit(),
        "uvloop": _uvloop(),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "cpu_model": cpu_model(),
        "governor": governor(),
        "load": round(os.getloadavg()[0], 2),
        "server": server,
        "rivals": dict(versions),
    }


def build() -> str:
    """How the core was compiled; ``pure`` where there is none."""
    return str(getattr(_implementation.default, "BUILD", "pure"))


def commit() -> str | None:
    """The commit of the source tree that fastlock runs from, with ``+`` if files were changed since; None elsewhere."""
    root = Path(fastlock.__file__).resolve().parent.parent
    if not (root / ".git").exists():  # git would name a repository that merely contains an installation
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def cpu_model() -> str | None:
    """The name that the kernel gives the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def governor() -> str | None:
    """The frequency governor of the first CPU; None where the machine does not say (most virtual ones)."""
    try:
        return Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").read_text(encoding="ascii").strip()
    except OSError:
        return None


def _uvloop() -> str | None:
    try:
        return version("uvloop")
    except PackageNotFoundError:
        return None
