"""Our client and the command line, as a user runs them, against a real server."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import typer
from numpy.typing import NDArray
from tests.proxy import Proxy
from websockets.asyncio.server import ServerConnection, serve

from mocha_client import connection
from mocha_client.client import ClientError, StreamingClient, endpoint, transcribe_stream
from mocha_client.continuity import Reconnected
from mocha_model.emissions import text_of
from mocha_model.recognizer import Recognizer
from mocha_server import cli as server_cli
from mocha_server.messages import Character, Encoding, End, Error, ErrorCode, Ready, Segment, Text

CLIP = str(Path(__file__).parents[1] / "fixtures" / "weather.wav")
M4A = Path(CLIP).with_suffix(".m4a")


@pytest.fixture(scope="module")
def expected(lively: Recognizer, clip: NDArray[np.int16]) -> str:
    return text_of(lively.transcribe(torch.from_numpy(clip.astype(np.float32) / 32768)))


def run(*arguments: str, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    command = [str(Path(sys.executable).with_name("mocha-asr")), *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=120, check=False)


async def test_streaming_client(lively_server: Any, clip: NDArray[np.int16], expected: str):
    async with StreamingClient(lively_server.url) as client:
        assert client.ready is not None and client.ready.model == "lively"
        data = clip.tobytes()
        for start in range(0, len(data), 3201):
            await client.send(data[start : start + 3201])
        await client.finish()
        events = [event async for event in client]
    assert isinstance(events[-1], End)
    assert " ".join(e.text for e in events if isinstance(e, Segment)) == expected
    assert "".join(e.delta for e in events if isinstance(e, Text)).strip() == expected


@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError])
async def test_what_a_source_raises_is_raised(lively_server: Any, error: type[BaseException]):
    async def broken() -> AsyncIterator[bytes]:
        yield bytes(2)
        raise error

    async with StreamingClient(lively_server.url) as client, asyncio.timeout(10):
        with pytest.raises(error):
            _ = [event async for event in client.transcribe(broken())]


async def test_who_listens_no_longer_may_go_on(lively_server: Any, clip: NDArray[np.int16]):
    async def pieces() -> AsyncIterator[bytes]:
        yield clip.tobytes()
        await asyncio.sleep(60)

    async with StreamingClient(lively_server.url) as client, asyncio.timeout(10):
        async with contextlib.aclosing(client.transcribe(pieces())) as events:
            await anext(events)
        await client.finish()
        assert isinstance([event async for event in client][-1], End)


def test_plain_function(lively_server: Any, clip: NDArray[np.int16], expected: str):
    events = transcribe_stream([clip.tobytes()], lively_server.url)
    assert " ".join(e.text for e in events if isinstance(e, Segment)) == expected


async def test_errors_are_typed(lively_server: Any):
    with pytest.raises(ClientError, match="no mocha-asr server"):
        await StreamingClient("ws://127.0.0.1:9/v1/stream").__aenter__()
    async with StreamingClient(lively_server.url, encoding="pcm_f32le") as client:  # type: ignore[arg-type]
        await client.send(np.array([np.nan], "<f4").tobytes())
        with pytest.raises(ClientError) as caught:
            _ = [event async for event in client]
    assert caught.value.code is ErrorCode.INVALID_AUDIO


async def test_a_full_server_says_so(make_server: Any, lively: Recognizer):
    server = make_server(lively, max_streams=1)
    async with StreamingClient(server.url):
        for _ in range(20):  # the refusal may come before the client has said anything
            with pytest.raises(ClientError) as caught:
                await StreamingClient(server.url).__aenter__()
            assert caught.value.code is ErrorCode.SERVER_FULL


async def test_a_key_is_sent_and_a_wrong_one_is_told_at_once(
    lively_server: Any, keyed_server: Any, clip: NDArray[np.int16], expected: str
):
    events = await asyncio.to_thread(transcribe_stream, [clip.tobytes()], keyed_server.url, api_key=keyed_server.key)
    assert " ".join(e.text for e in events if isinstance(e, Segment)) == expected
    for key, why in ((None, "none was given"), ("wrong", "not the right one")):
        with pytest.raises(ClientError, match=rf"wants its key \(HTTP 401\): .*{why}"):
            await StreamingClient(keyed_server.url, api_key=key).__aenter__()
    for key in ("two words", "line\n", "é"):
        with pytest.raises(ClientError, match="no header can carry") as refused:
            StreamingClient(keyed_server.url, api_key=key)
        assert key not in str(refused.value)
    async with Proxy(keyed_server.port) as proxy, StreamingClient(proxy.url, api_key=keyed_server.key) as client:
        await client.send(clip.tobytes())
        proxy.cut()
        await client.finish()
        events = [event async for event in client]
        assert any(isinstance(event, Reconnected) for event in events)
    async with Proxy(lively_server.port) as proxy, StreamingClient(proxy.url, api_key="wrong") as client:
        proxy.target = keyed_server.port
        proxy.cut()
        async with asyncio.timeout(10):  # the first of its attempts is the last
            with pytest.raises(ClientError, match="not the right one"):
                _ = [event async for event in client]


def test_the_stream_command_sends_a_key(keyed_server: Any, expected: str, monkeypatch: pytest.MonkeyPatch):
    options = ("stream", CLIP, "--url", keyed_server.url)
    assert run(*options, "--api-key", keyed_server.key).stdout.decode().strip() == expected
    monkeypatch.setenv("MOCHA_API_KEY", keyed_server.key)
    assert run(*options).stdout.decode().strip() == expected
    shown = run("stream", "--help").stdout.decode()
    assert "MOCHA_API_KEY" in shown and keyed_server.key not in shown
    monkeypatch.setenv("MOCHA_API_KEY", "wrong.key")
    refused = run(*options)
    (line,) = refused.stderr.decode().splitlines()
    assert refused.returncode == 1 and line.startswith("error: the server at") and "wrong.key" not in line


@pytest.mark.parametrize("path", ["/v1/realtime", "/v1/listen?encoding=linear16&sample_rate=16000"])
async def test_another_protocol_is_no_server_of_ours(lively_server: Any, path: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection, "READY_S", 0.5)  # Deepgram's answers nothing
    with pytest.raises(ClientError, match=r"does not answer as /v1/stream"):
        await StreamingClient(lively_server.url.removesuffix("/v1/stream") + path).__aenter__()


@pytest.mark.parametrize("chunk_ms", ["10", "37", "5000"])
def test_stream_command_prints_one_json_object(lively_server: Any, expected: str, chunk_ms: str):
    done = run("stream", CLIP, "--url", lively_server.url, "--chunk-ms", chunk_ms, "--json")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.decode().splitlines()
    result = json.loads(line)
    assert result["text"] == expected
    assert " ".join(w["word"] for w in result["words"]) == expected
    assert {"word", "start", "end"} <= set(result["words"][0])


@pytest.mark.parametrize("path", ["", "/"])
async def test_the_address_of_the_page_will_do(lively_server: Any, path: str):
    async with StreamingClient(lively_server.http + path) as client:
        assert client.url == lively_server.url and client.ready is not None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("https://example.org", "wss://example.org/v1/stream"),
        ("https://example.org/asr/v1/stream?key=1", "wss://example.org/asr/v1/stream?key=1"),
        ("https://example.org/asr/", "wss://example.org/asr/v1/stream"),
        ("http://example.org/asr?key=1", "ws://example.org/asr/v1/stream?key=1"),
        ("ws://[::1]:8000/v1/stream", "ws://[::1]:8000/v1/stream"),
        ("ws://localhost:2700/other", "ws://localhost:2700/other"),
    ],
)
def test_endpoints(given: str, expected: str):
    assert endpoint(given) == expected


@pytest.mark.parametrize(
    "given", ["ws://[::1", "localhost:8000", "nonsense", "ws://localhost:99999/", "ws://localhost:abc/"]
)
def test_what_is_no_address_is_a_typed_error(given: str):
    with pytest.raises(ClientError, match="not the address of a server"):
        StreamingClient(given)


def test_commands_say_that_it_is_no_address():
    done = run("bench", "--url", "nonsense")
    assert done.returncode == 1 and b"not the address of a server" in done.stderr and b"Traceback" not in done.stderr


async def test_proxies_of_the_environment(lively_server: Any, monkeypatch: pytest.MonkeyPatch):
    for proxy, why in ("127.0.0.1:9", "isn't a valid"), ("socks5://127.0.0.1:9", "python-socks"):
        for name in ("http_proxy", "https_proxy", "socks_proxy", "all_proxy"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("socks_proxy" if proxy.startswith("socks") else "https_proxy", proxy)
        with pytest.raises(ClientError, match=f"no mocha-asr server answers at wss://example.org.*{why}"):
            await StreamingClient("https://example.org").__aenter__()
        async with StreamingClient(lively_server.url) as client:  # on this machine there is nothing in between
            assert client.ready


async def test_stream_command_prints_what_there_is_where_the_stream_fails():
    letter = Character(text="a", frame=5, time=0.2, p=0.8, q=0.5, chunk=[1.0])
    ready = Ready(session="a", model="m", sample_rate=16_000, frame_ms=40, latency_ms=25, chunk_width=2)
    odd = Error(code=ErrorCode.INVALID_AUDIO, message="half a sample", fatal=False)
    failed = Error(code=ErrorCode.TOO_SLOW, message="too slow")

    async def fail(socket: ServerConnection) -> None:
        for message in (ready, odd, Text(segment=0, delta="a", characters=[letter]), failed):
            await socket.send(message.model_dump_json())

    async with serve(fail, "127.0.0.1", 0) as server:
        url = f"ws://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}/"
        done = await asyncio.to_thread(run, "stream", CLIP, "--json", "--url", url)
    assert done.returncode == 1 and json.loads(done.stdout)["text"] == "a"
    assert done.stderr.decode().splitlines() == ["warning: half a sample", "error: too slow"]


def test_stream_command_reads_a_pipe_and_prints_text(lively_server: Any, expected: str):
    done = run("stream", "-", "--url", lively_server.url, stdin=Path(CLIP).read_bytes())
    assert done.stdout.decode().strip() == expected


def test_stream_command_explains_what_is_wrong(lively_server: Any, tmp_path: Path):
    assert b"no mocha-asr server" in run("stream", CLIP, "--url", "ws://127.0.0.1:9/x").stderr
    done = run("stream", str(tmp_path / "missing.wav"), "--url", lively_server.url)
    assert done.returncode == 1 and b"missing.wav" in done.stderr and not done.stdout
    done = run("stream", str(tmp_path / "missing.wav"), CLIP, "--url", lively_server.url)
    assert done.returncode == 1 and b"missing.wav" in done.stderr and done.stdout.strip()  # as far as that can be
    (tmp_path / "speech.raw").write_bytes(bytes(32_000))
    for path, stdin in ((str(tmp_path / "speech.raw"), None), ("-", bytes(32_000)), ("-", b"")):
        done = run("stream", path, "--url", lively_server.url, stdin=stdin)
        assert done.returncode == 1 and b"without a header it needs --encoding" in done.stderr
    done = run("stream", CLIP, "--sample-rate", "8000", "--url", lively_server.url)
    assert done.returncode == 2 and b"need --encoding" in done.stderr
    captions = tmp_path / "no" / "such" / "place.srt"
    assert run("stream", CLIP, "--url", lively_server.url, "--captions", str(captions)).returncode == 0
    assert captions.read_text()
    assert run("stream").returncode == 2
    at_its_end = run("stream", "-", "--url", lively_server.url, stdin=M4A.read_bytes())
    assert at_its_end.returncode == 1 and b"cannot be read from a pipe" in at_its_end.stderr
    assert run("stream", str(M4A), "--url", lively_server.url).stdout.strip()


def test_a_container_could_not_go_on_over_a_new_connection():
    with pytest.raises(ValueError, match="has to be decoded first"):
        StreamingClient(encoding=Encoding.CONTAINER)


def test_closed_pipes_and_full_disks_are_one_line(lively_server: Any):
    def shell(command: str) -> bytes:
        command = f"{Path(sys.executable).with_name('mocha-asr')} {command}"
        return subprocess.run(command, shell=True, capture_output=True, timeout=120, check=False).stderr

    assert shell(f"stream - --encoding mulaw --url {lively_server.url} <&-") == (
        b"error: -: cannot be read (standard input is closed)\n"
    )
    assert shell("--help | true") == b""
    if Path("/dev/full").exists():
        told = shell(f"transcribe {CLIP} --beam 0 >/dev/full").strip()
        assert told == b"error: standard output: No space left on device"


def test_transcribe_reads_the_files_that_it_can(tmp_path: Path):
    done = run("transcribe", str(tmp_path / "missing.wav"), __file__, CLIP, "--beam", "0")
    assert done.returncode == 1 and done.stdout.strip()
    errors = " ".join(done.stderr.decode().split())
    assert "No such file" in errors and "not a file of a known audio format" in errors


def test_transcribe_command(tmp_path: Path):
    done = run("transcribe", CLIP, "--format", "json", "--beam", "0")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["text"] == " ".join(w["word"] for w in result["words"])
    assert all(w["start"] < w["end"] for w in result["words"])
    missing = run("transcribe", str(tmp_path / "nothing.wav"), "--beam", "0")
    assert missing.returncode == 1 and b"nothing.wav" in missing.stderr
    several = run("transcribe", CLIP, CLIP, "--format", "srt", "--beam", "0")
    assert several.returncode == 2 and not several.stdout and b"srt is of one file" in several.stderr


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_server_says_where_it_is_when_it_serves(workers: str):
    command = [str(Path(sys.executable).with_name("mocha-asr")), "serve", "--port", "0", "--workers", workers]
    environment = {**os.environ, "MOCHA_FILE_BEAM": "0", "MOCHA_LIVE_BEAM": "0"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as server:
        assert server.stdout
        told = server.stdout.readline()
        address = told.removeprefix("open ").split()[0]
        try:
            assert httpx.get(f"{address}health").json()["status"] == "ok", told
        finally:
            server.terminate()
        assert not server.stdout.read()


def test_a_server_that_cannot_serve_says_why_and_nothing_else(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run("serve", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 1 and b"cannot listen" in done.stderr and b"open" not in done.stderr
    monkeypatch.setenv("MOCHA_LIVE_PATIENCE_MS", "100")
    done = run("serve", "--port", "0")
    assert done.returncode == 1 and done.stderr.startswith(b"error: live_patience_ms: at least 252 for this model")


def test_one_port_cannot_be_that_of_two_protocols(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    for port, why in (("8125", "both HTTP and Wyoming"), ("0", "0 is no port for Wyoming")):
        monkeypatch.setenv("MOCHA_WYOMING_PORT", port)
        with pytest.raises(typer.Exit):
            server_cli.serve(port=8125)
        assert why in capsys.readouterr().err


def test_stream_never_loads_torch():
    code = "import mocha_client.cli, mocha_client.client, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_command_whose_packages_are_not_installed_names_the_extra():
    code = "import sys; sys.modules['jiwer'] = None; sys.argv[1:] = ['train']; import mocha_client.cli as c; c.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (
        done.returncode == 1 and done.stderr == b"error: train needs jiwer: install mocha-asr with the extra `train`\n"
    )
    code = "import sys; sys.modules['uvicorn'] = None; sys.argv[1:] = ['serve']; import mocha_client.cli as c; c.main()"
    broken = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert broken.returncode == 1 and b"Traceback" in broken.stderr and b"uvicorn" in broken.stderr


def test_help_names_every_command():
    shown = run("--help").stdout.decode()
    assert all(name in shown for name in ("serve", "stream", "transcribe", "train", "evaluate"))
    assert run("fly").returncode == 2
