"""The npm packages `openai` and `@deepgram/sdk`, unmodified, against a real server: the native protocol's text.

They are installed by `npm install` in tests/e2e/node; where that was not done, these tests skip.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.conftest import exchange

NODE = Path(__file__).parent / "node"

pytestmark = pytest.mark.skipif(
    shutil.which("node") is None or not (NODE / "node_modules" / "openai").is_dir(),
    reason="needs node and `npm install` in tests/e2e/node",
)


def run(program: str, *arguments: str, **environment: str) -> dict[str, Any]:
    done = subprocess.run(
        ["node", program, *arguments],
        cwd=NODE,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture
def files(speech: Any, tmp_path: Path) -> tuple[str, str]:
    """The clip with and without a header."""
    (tmp_path / "speech.wav").write_bytes(speech.wav)
    (tmp_path / "speech.raw").write_bytes(speech.pcm)
    return str(tmp_path / "speech.wav"), str(tmp_path / "speech.raw")


def test_openai_transcriptions(any_server: Any, speech: Any, heard: Callable[..., Any], files: tuple[str, str]):
    expected = heard(any_server, speech.pcm)
    with exchange("openai-node", any_server):
        found = run("transcriptions.mjs", any_server.http, files[0])
    assert found["text"] == found["done"] == expected.text
    assert found["deltas"].split() == expected.text.split()
    assert [w["word"] for w in found["words"]] == [w["word"] for w in expected.words]
    assert found["refused"] == {"status": 400, "code": "translation_unsupported"}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a certificate for 127.0.0.1."""
    folder = tmp_path_factory.mktemp("certificates")
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    options = "req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    names = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run(["openssl", *options.split(), *names], check=True, capture_output=True)
    return folder


def test_openai_realtime(
    any_server: Any, speech: Any, heard: Callable[..., Any], files: tuple[str, str], certificates: Path
):
    expected = heard(any_server, speech.pcm)
    trust = {"NODE_EXTRA_CA_CERTS": str(certificates / "cert.pem")}
    with exchange("openai-node-realtime", any_server):
        found = run("realtime.mjs", any_server.http, files[1], str(certificates), **trust)
    assert found["text"] == expected.text and found["deltas"].split() == expected.text.split()


def test_deepgram(any_server: Any, speech: Any, heard: Callable[..., Any], files: tuple[str, str]):
    expected = heard(any_server, speech.pcm)
    with exchange("deepgram-node", any_server):
        found = run("deepgram.mjs", any_server.http, *files)
    assert found["file"] == found["live"] == expected.text and found["interims"] > 1
