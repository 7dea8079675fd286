"""`POST /v1/audio/transcriptions` over a real socket, and the pages beside it."""

import asyncio
import gc
import http.client
import io
import json
import resource
import socket
import tempfile
import time
import wave
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import av
import httpx
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mocha_model.emissions import text_of
from mocha_model.recognizer import Recognizer
from mocha_server import serving
from mocha_server.app import create_app
from mocha_server.protocols import openai_transcriptions, upload
from mocha_server.settings import Settings

FIXTURES = Path(__file__).parents[1] / "fixtures"


def post(server: Any, name: str, **fields: str) -> httpx.Response:
    with (FIXTURES / name).open("rb") as file:
        return httpx.post(
            f"{server.http}/v1/audio/transcriptions", files={"file": (name, file)}, data=fields, timeout=60
        )


@pytest.fixture(scope="module")
def expected(lively: Recognizer, clip: NDArray[np.int16]) -> str:
    return text_of(lively.transcribe(torch.from_numpy(clip.astype(np.float32) / 32768)))


@pytest.mark.parametrize("name", ["weather.wav", "weather.flac"])
def test_lossless_files_give_the_offline_text(lively_server: Any, expected: str, name: str):
    body = post(lively_server, name, model="whisper-1").json()
    assert body == {"text": expected, "usage": {"type": "duration", "seconds": 4}}


@pytest.mark.parametrize(
    "name", ["weather.mp3", "weather.ogg", "weather.opus", "weather.m4a", "weather.webm", "truncated.mp3"]
)
def test_other_formats_are_heard(lively_server: Any, name: str):
    assert post(lively_server, name).json()["text"]


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/listen"])
async def test_a_client_that_leaves_frees_its_place(lively_server: Any, path: str):
    hour = io.BytesIO()
    with wave.open(hour, "wb") as file:
        file.setparams((1, 2, 8_000, 0, "NONE", ""))
        file.writeframes(bytes(2 * 8_000 * 3600))
    given = {"content": hour.getvalue()} if path == "/v1/listen" else {"files": {"file": ("hour.wav", hour)}}
    async with httpx.AsyncClient(timeout=60) as client:
        posting = asyncio.create_task(client.post(lively_server.http + path, **given))
        assert await lively_server.streams_left(1) == 1
        posting.cancel()
        assert await lively_server.streams_left(0) == 0


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/listen"])
def test_a_file_that_is_too_large_is_refused(make_server: Any, lively: Recognizer, path: str):
    server = make_server(lively, max_upload_mb=1)
    for size, status in ((1_100_000, 413), (900_000, 400)):  # the second is no audio
        given = {"files": {"file": ("a.wav", bytes(size))}} if "audio" in path else {"content": iter([bytes(size)])}
        response = httpx.post(server.http + path, **given, timeout=60)  # type: ignore[arg-type]
        assert response.status_code == status
        assert ("more than 1 MB" in response.text) == (status == 413)
    assert server.num_streams == 0


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/listen"])
def test_an_upload_that_stands_still_is_given_up(make_server: Any, lively: Recognizer, path: str):
    server = make_server(lively, idle_s=0.5)
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        head = [f"POST {path} HTTP/1.1", "Host: x", "Content-Length: 1000000"]
        if path == "/v1/audio/transcriptions":
            head.append("Content-Type: multipart/form-data; boundary=b")
        client.sendall("\r\n".join([*head, "", "--b\r\n"]).encode())
        answer = b""
        while not answer.endswith(b"}") and (more := client.recv(10_000)):
            answer += more
        assert answer.startswith(b"HTTP/1.1 408 ") and b'code":"idle"' in answer and b"nothing was sent" in answer


def begun(
    server: Any, path: str, size: int, stream: str = "false", **headers: str
) -> tuple[http.client.HTTPConnection, bytes, bytes]:
    """A connection, what begins an upload of `size` bytes on it, and what ends it."""
    before = after = b""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.putrequest("POST", path)
    for name, value in headers.items():
        connection.putheader(name, value)
    if path.endswith("transcriptions"):
        connection.putheader("Content-Type", "multipart/form-data; boundary=b")
        disposition = b'--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\n'
        before = disposition % b"stream" + stream.encode() + b"\r\n" + disposition % b'file"; filename="a'
        after = b"\r\n--b--\r\n"
    connection.putheader("Content-Length", str(len(before) + size + len(after)))
    connection.endheaders()
    return connection, before, after


def code_of(answer: http.client.HTTPResponse) -> str:
    """In both protocols' errors."""
    body = json.loads(answer.read())
    return str(body["error"]["code"] if "error" in body else body["err_code"])


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/listen"])
def test_uploads_that_are_sent_at_once_are_limited(
    make_server: Any, lively: Recognizer, monkeypatch: pytest.MonkeyPatch, path: str
):
    monkeypatch.setattr(upload, "UPLOADS_AT_ONCE", 1)
    server, audio = make_server(lively), (FIXTURES / "weather.wav").read_bytes()
    first, before, after = begun(server, path, len(audio))
    first.send(before + audio[:1000])
    while not getattr(server.app.state, "num_uploads_read", 0):
        time.sleep(0.01)
    second, before, after = begun(server, path, len(audio))
    second.send(before + audio + after)
    refused = second.getresponse()
    assert refused.status == 503 and code_of(refused) == "server_full"
    first.send(audio[1000:] + after)
    assert first.getresponse().status == 200
    second.request("GET", "/health")  # on the same connection
    assert second.getresponse().status == 200 and server.app.state.num_uploads_read == 0
    first.close()
    second.close()


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/listen"])
@pytest.mark.parametrize("lacks", ["space", "a directory"])
def test_a_file_that_the_disk_has_no_room_for_is_refused(
    lively_server: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, path: str, lacks: str
):
    """And is told so after all of it is sent: before that, many do not read an answer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    connection, before, after = begun(lively_server, path, 20_000_000, Connection="close")
    try:
        if lacks == "space":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, hard))
        else:
            monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
        connection.send(before + bytes(20_000_000) + after)
        refused = connection.getresponse()
        assert refused.status == 503 and code_of(refused) == "internal"
        assert httpx.get(f"{lively_server.http}/health").status_code == 200
        gc.collect()  # an open file would warn, and one that could not be closed say so
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (said,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "temporary file" in said.getMessage() and said.exc_info is None
    connection.close()


async def test_what_a_full_disk_did_not_take_is_no_second_error(caplog: pytest.LogCaptureFixture):
    file = Path("/dev/full").open("wb")  # noqa: ASYNC230, SIM115
    file.write(b"waits in a buffer")
    upload.discard(file)
    await asyncio.sleep(0.1)
    gc.collect()
    assert not caplog.records


def test_events_that_nobody_reads_keep_no_place(make_server: Any, lively: Recognizer, monkeypatch: pytest.MonkeyPatch):
    event = openai_transcriptions._event
    monkeypatch.setattr(openai_transcriptions, "_event", lambda data: b":" + bytes(1 << 22) + b"\n" + event(data))
    monkeypatch.setattr(serving, "SLOW_S", 0.3)
    server, audio = make_server(lively), (FIXTURES / "weather.wav").read_bytes()
    client, before, after = begun(server, "/v1/audio/transcriptions", len(audio), stream="true")
    client.send(before + audio + after)
    deadline, answering = time.monotonic() + 10, server._server.server_state.tasks
    while not server.num_streams:
        time.sleep(0.001)
    while server.num_streams or answering:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    client.close()


@pytest.mark.parametrize("charset", ["undefined", "punycode"])
def test_a_form_in_no_charset_is_refused(lively_server: Any, caplog: pytest.LogCaptureFixture, charset: str):
    headers = {"content-type": f"multipart/form-data; boundary=b; charset={charset}"}
    form = b'--b\r\nContent-Disposition: form-data; name="\xff"\r\n\r\nx\r\n--b--\r\n'
    response = httpx.post(f"{lively_server.http}/v1/audio/transcriptions", content=form, headers=headers)
    assert response.status_code == 400 and response.json()["error"]["code"] == "invalid_form"
    assert not caplog.records


@pytest.mark.parametrize("rate", [4, 999])
def test_a_rate_that_no_speech_has_is_refused_before_it_fills_the_memory(lively_server: Any, rate: int):
    packed = io.BytesIO()
    with av.open(packed, "w", format="flac") as file:
        stream = file.add_stream("flac", rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 60_000), np.int16), format="s16", layout="mono")
        frame.sample_rate = rate
        file.mux([*stream.encode(frame), *stream.encode(None)])
    response = httpx.post(
        f"{lively_server.http}/v1/audio/transcriptions", files={"file": ("slow.flac", packed.getvalue())}, timeout=60
    )
    assert response.status_code == 400 and response.json()["error"]["code"] == "unsupported_media"
    assert f"{rate} Hz" in response.json()["error"]["message"]


@asynccontextmanager
async def ending(
    recognizer: Recognizer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> AsyncIterator[tuple[str, int]]:
    """The address of a server that ends after the block, without an error in its log."""
    monkeypatch.setattr(serving, "SHUTDOWN_S", 1)
    listener = socket.create_server(("127.0.0.1", 0))
    begun, address = asyncio.Event(), listener.getsockname()
    server = serving.server(create_app(Settings(file_beam=0, live_beam=0), recognizer), begun.set)
    running = asyncio.create_task(server.serve([listener]))
    await begun.wait()
    yield address
    server.should_exit = True
    await asyncio.wait_for(running, 60)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/translations", "/v1/listen"])
@pytest.mark.parametrize("flows", [False, True])
async def test_an_upload_that_the_end_of_the_server_cuts_off_is_told(
    lively: Recognizer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], path: str, flows: bool
):
    async def flow(writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while flows:
                writer.write(bytes(10_000))
                await writer.drain()

    async with ending(lively, monkeypatch, capfd) as address:
        reader, writer = await asyncio.open_connection(*address)
        head = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {10**13}"]
        head += ["Content-Type: multipart/form-data; boundary=b"] if path.endswith("transcriptions") else []
        part = '--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        writer.write("\r\n".join([*head, "", part]).encode())
        flowing = asyncio.create_task(flow(writer))
        await asyncio.sleep(0.1)  # some of it is read; how much makes no difference
    with suppress(ConnectionError):  # what was not read may take the answer with it
        answer = await asyncio.wait_for(reader.read(), 60)
        assert answer.startswith(b"HTTP/1.1 503 ") and b"the server stops" in answer
        assert not flows or flowing
    flowing.cancel()
    writer.close()


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/listen", "stream"])
async def test_a_file_that_is_read_when_the_server_ends_is_told(
    lively: Recognizer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], path: str
):
    hours = io.BytesIO()
    with wave.open(hours, "wb") as file:
        file.setparams((1, 2, 8_000, 0, "NONE", ""))
        file.writeframes(bytes(2 * 8_000 * 20_000))
    form = {"files": {"file": ("hours.wav", hours)}, "data": {"stream": "true"} if path == "stream" else {}}
    given = {"content": hours.getvalue()} if path == "/v1/listen" else form
    async with httpx.AsyncClient(timeout=60) as client:
        async with ending(lively, monkeypatch, capfd) as (host, port):
            where = f"http://{host}:{port}{'/v1/audio/transcriptions' if path == 'stream' else path}"
            asking = asyncio.create_task(client.post(where, **given))
            for _ in range(1000):
                if 'mocha_streams{engine="greedy"} 1' in (await client.get(f"http://{host}:{port}/metrics")).text:
                    break
                await asyncio.sleep(0.01)
        answer = await asking
    assert answer.status_code == (200 if path == "stream" else 503) and "the server stops" in answer.text
    gc.collect()  # an open file would warn


def test_what_a_form_holds_beside_its_file_is_limited(lively_server: Any):
    for fields in ({"prompt": "x" * 70_000}, {f"field {n}": "x" for n in range(301)}):
        response = post(lively_server, "weather.wav", **fields)
        assert response.status_code == 400 and response.json()["error"]["code"] == "invalid_form"


def test_response_formats(lively_server: Any, expected: str):
    assert post(lively_server, "weather.wav", response_format="text").text == expected + "\n"
    verbose = post(lively_server, "weather.wav", response_format="verbose_json").json()
    assert verbose["text"] == expected and verbose["duration"] == pytest.approx(3.54, abs=0.1)
    assert " ".join(w["word"] for w in verbose["words"]) == expected
    wanted = {"id", "seek", "start", "end", "text", "tokens", "temperature", "avg_logprob", "compression_ratio"}
    assert wanted | {"no_speech_prob"} == set(verbose["segments"][0])
    srt = post(lively_server, "weather.wav", response_format="srt").text
    assert srt.startswith("1\n00:00:0") and " --> " in srt
    assert post(lively_server, "weather.wav", response_format="vtt").text.startswith("WEBVTT\n\n00:00:0")


async def test_who_waits_for_long_is_told_that_it_goes_on():
    async def items() -> AsyncIterator[int]:
        yield 1
        await asyncio.sleep(0.25)
        yield 2
        raise ValueError("broken")

    told: list[int | None] = []

    async def listen() -> None:
        async for item in upload.never_silent(items(), 0.1):
            told.append(item)

    with pytest.raises(ValueError, match="broken"):
        await listen()
    assert told[0] == 1 and told[-1] == 2 and len(told) > 2 and set(told[1:-1]) == {None}


@pytest.mark.parametrize("silent_s", [60, 0])
def test_server_sent_events(lively_server: Any, expected: str, silent_s: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(openai_transcriptions, "SILENT_S", silent_s)
    sent = post(lively_server, "weather.wav", stream="true").text.splitlines()
    lines = [line for line in sent if line and not line.startswith(":")]
    assert (len(lines) < len([line for line in sent if line])) == (silent_s == 0)
    assert lines[-1] == "data: [DONE]"
    events = [httpx.Response(200, text=line.removeprefix("data: ")).json() for line in lines[:-1]]
    assert {e["type"] for e in events[:-1]} == {"transcript.text.delta"}
    assert events[-1]["type"] == "transcript.text.done" and events[-1]["text"] == expected
    assert "".join(e["delta"] for e in events[:-1]).strip() == expected


@pytest.mark.parametrize(("name", "code"), [("document.wav", "unsupported_media"), ("empty.wav", "unsupported_media")])
def test_bad_files_get_openai_errors(lively_server: Any, name: str, code: str):
    data = b"" if name == "empty.wav" else (FIXTURES / name).read_bytes()
    response = httpx.post(f"{lively_server.http}/v1/audio/transcriptions", files={"file": (name, data)})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", code, "file")


def test_bad_requests(lively_server: Any):
    assert httpx.post(f"{lively_server.http}/v1/audio/transcriptions").json()["error"]["code"] == "missing_file"
    assert (
        post(lively_server, "weather.wav", response_format="xml").json()["error"]["code"] == "invalid_response_format"
    )


def test_other_paths_and_methods_get_openai_errors(lively_server: Any):
    for method, path, status, headers in (
        ("GET", "/v1/audio/transcriptions", 405, {"allow": "POST"}),
        ("PUT", "/v1/listen", 405, {"allow": "POST"}),
        ("POST", "/v1/models", 405, {"allow": "GET"}),
        ("GET", "/v1/listen", 426, {"upgrade": "websocket", "connection": "Upgrade"}),
        ("GET", "/v1/stream", 426, {"upgrade": "websocket", "connection": "Upgrade"}),
        ("POST", "/v1/stream", 404, {}),
        ("POST", "/v1/audio/transcriptions/", 404, {}),
        ("POST", "/v1/chat/completions", 404, {}),
        ("GET", "/v1/nothing", 404, {}),
    ):
        response = httpx.request(method, lively_server.http + path)
        assert response.status_code == status, path
        assert headers.items() <= dict(response.headers).items()
        assert (
            response.json()["error"]["type"] == "invalid_request_error" and path in response.json()["error"]["message"]
        )


@pytest.mark.parametrize("live", [True, False])
def test_health_of_a_server_that_serves_no_streams_or_no_files(make_server: Any, lively: Recognizer, live: bool):
    server = make_server(lively)
    assert httpx.head(f"{server.http}/health").status_code == 200
    stopped = server.app.state.live.greedy if live else server.app.state.file_engine
    stopped.stop()
    response = httpx.get(f"{server.http}/health")
    assert response.status_code == 503 and response.json()["status"] == "stopped"
    assert httpx.head(f"{server.http}/health").status_code == 503


def test_pages(lively_server: Any):
    assert httpx.get(f"{lively_server.http}/health").json()["status"] == "ok"
    (listed,) = httpx.get(f"{lively_server.http}/v1/models").json()["data"]
    assert listed["id"] == "lively" and httpx.get(f"{lively_server.http}/v1/models/lively").json() == listed
    other = httpx.get(f"{lively_server.http}/v1/models/other")
    assert other.status_code == 404 and other.json()["error"]["code"] == "model_not_found"
    assert "mocha_streams" in httpx.get(f"{lively_server.http}/metrics").text
    assert "/v1/audio/transcriptions" in httpx.get(f"{lively_server.http}/openapi.json").json()["paths"]
    page = httpx.get(f"{lively_server.http}/")
    assert "mocha-asr" in page.text and "default-src 'none'" in page.headers["content-security-policy"]
