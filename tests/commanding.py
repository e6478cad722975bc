"""Commands of lut4tool in the process of a test."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from lut4tool import cli


class Result(NamedTuple):
    status: int
    out: str
    err: str


Run = Callable[..., Result]


def runner(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """A function that runs a command and returns how it ended and what it said."""

    def run(*words: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["lut4tool", *map(str, words)])
        status = 0
        try:
            cli.main()
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else 0
        return Result(status, *capsys.readouterr())

    return run
