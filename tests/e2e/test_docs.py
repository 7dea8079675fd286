"""The programs of docs/clients run as printed: only the address is that of the test's server."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mocha_client

CLIENTS = Path(__file__).parents[2] / "docs" / "clients"
JAVASCRIPT = Path(mocha_client.__file__).parent / "javascript"
NPM = Path(__file__).parent / "node" / "node_modules"
LANGUAGES = {"python": [sys.executable, "program.py"], "js": ["node", "--experimental-websocket", "program.mjs"]}
PROGRAMS = [
    (page.name, language, program)
    for page in sorted(CLIENTS.glob("*.md"))
    for language, program in re.findall(r"```(\w+)\n(.*?)```", page.read_text(), re.DOTALL)
]


def test_every_page_is_in_the_overview_and_the_other_way_round():
    overview = (CLIENTS / "README.md").read_text()
    pages = {page.name for page in CLIENTS.glob("*.md")} - {"README.md"}
    assert set(re.findall(r"\]\(([\w-]+\.md)\)", overview)) == pages
    assert {page for page, _, _ in PROGRAMS} == pages


@pytest.fixture(scope="module")
def recording(request: pytest.FixtureRequest, speech: Any) -> Any:
    """Recorded speech where there is some, else the synthesized."""
    try:
        corpus = request.getfixturevalue("recorded")
    except pytest.skip.Exception:
        return speech
    return replace(speech, samples=np.asarray(corpus.pcm(0)))


@pytest.mark.parametrize(("page", "language", "program"), PROGRAMS, ids=[f"{p}-{k}" for p, k, _ in PROGRAMS])
def test_program(
    server: Any,
    recording: Any,
    heard: Callable[..., Any],
    tmp_path: Path,
    page: str,
    language: str,
    program: str,
):
    command = LANGUAGES[language]
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs {command[0]}")
    if 'from "openai"' in program and not NPM.is_dir():
        pytest.skip("needs `npm install` in tests/e2e/node")
    program = program.replace("localhost:8000", f"127.0.0.1:{server.port}")
    program = program.replace('"localhost", 10300', f'"127.0.0.1", {server.app.state.wyoming_port}')
    (tmp_path / command[-1]).write_text(program)
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules" / "mocha-asr").symlink_to(JAVASCRIPT)  # as `npm install` of a folder does
    (tmp_path / "node_modules" / "openai").symlink_to(NPM / "openai")
    (tmp_path / "speech.wav").write_bytes(recording.wav)
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    expected = heard(server, recording.pcm)
    assert expected.segments and all(segment["text"] in done.stdout for segment in expected.segments)
