"""`mocha-asr stream` with sources that are still talking: real pipes from ffmpeg, captions meanwhile, a microphone."""

import asyncio
import contextlib
import ctypes.util
import fcntl
import io
import itertools
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
import types
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.proxy import Proxy

from mocha_client import cli
from mocha_client.captions import Captions
from mocha_client.client import transcribe_stream
from mocha_client.sources import microphone_pieces, read_aside
from mocha_client.terminal import FLOOR_DB, level_db, level_meter
from mocha_server.messages import Segment, Text, Word
from mocha_server.subtitles import srt, vtt

CLIP = Path(__file__).parents[1] / "fixtures" / "weather.wav"
COMMAND = str(Path(sys.executable).with_name("mocha-asr"))

needs_ffmpeg = pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="needs the command ffmpeg at the other end")


@pytest.fixture(scope="module")
def expected(lively_server: Any, clip: NDArray[np.int16]) -> str:
    return heard(lively_server, clip.tobytes())


def heard(server: Any, pcm: bytes) -> str:
    return " ".join(e.text for e in transcribe_stream([pcm], server.url) if isinstance(e, Segment))


@needs_ffmpeg
@pytest.mark.parametrize(
    ("ffmpeg", "options"),
    [
        ("-f wav", ""),
        ("-f ogg -c:a flac", ""),
        ("-f s16le", "--encoding pcm_s16le"),
        ("-f f32le -ac 2 -ar 48000", "--encoding pcm_f32le --sample-rate 48000 --channels 2"),
    ],
)
def test_pipe_from_ffmpeg(lively_server: Any, expected: str, ffmpeg: str, options: str):
    sender = f"ffmpeg -v error -i {CLIP} {ffmpeg} -"
    receiver = f"{COMMAND} stream - --json --url {lively_server.url} {options}"
    done = subprocess.run(f"{sender} | {receiver}", shell=True, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    text = json.loads(done.stdout)["text"]
    if "48000" in ffmpeg:  # resampled twice: not the very same samples
        pcm = subprocess.run(f"{sender} ".split(), capture_output=True, check=True).stdout
        events = transcribe_stream([pcm], lively_server.url, 48_000, "pcm_f32le", 2)  # type: ignore[arg-type]
        expected = " ".join(e.text for e in events if isinstance(e, Segment))
    assert text == expected


class Process:
    """A command whose output is read as it comes."""

    def __init__(self, *arguments: str, stdin: int | None = subprocess.PIPE, **options: Any) -> None:
        self.process = subprocess.Popen(
            [COMMAND, *arguments], stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
        )
        self.shown = ""

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *failure: object) -> None:
        self.process.kill()  # where the test has failed it still runs
        with self.process:
            pass

    def feed(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def unread(self) -> int:
        """Bytes that were fed and wait in the pipe."""
        assert self.process.stdin is not None
        return int.from_bytes(fcntl.ioctl(self.process.stdin, termios.FIONREAD, bytes(4)), sys.byteorder)

    def until_shown(self, some: int) -> None:
        """Wait until `some` characters were printed; fails if the command ends before."""
        assert self.process.stdout is not None
        while len(self.shown.strip()) < some:
            data = os.read(self.process.stdout.fileno(), 4096)
            assert data, self.process.stderr.read() if self.process.stderr else ""
            self.shown += data.decode()

    def end(self) -> str:
        rest, errors = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, errors
        return (self.shown + rest.decode()).strip()


@pytest.mark.parametrize("header", [True, False], ids=["wav", "raw"])
@pytest.mark.parametrize("suffix", [".srt", ".vtt"])
def test_text_and_captions_come_while_the_pipe_is_open(
    lively_server: Any, clip: NDArray[np.int16], tmp_path: Path, header: bool, suffix: str
):
    pcm = np.tile(clip, 3).tobytes()
    path = tmp_path / f"live{suffix}"
    options = [] if header else ["--encoding", "pcm_s16le"]
    with Process("stream", "-", "--url", lively_server.url, "--captions", str(path), *options) as command:
        if header:
            sizes = b"\xff\xff\xff\xff"  # as ffmpeg writes them where it cannot seek back
            data_format = (
                (1).to_bytes(2, "little") * 2 + (16_000).to_bytes(4, "little") + (32_000).to_bytes(4, "little")
            )
            command.feed(
                b"RIFF" + sizes + b"WAVEfmt " + (16).to_bytes(4, "little") + data_format + b"\2\0\x10\0data" + sizes
            )
        states: list[str] = []
        for third in range(3):
            command.feed(pcm[third * len(pcm) // 3 : (third + 1) * len(pcm) // 3])
            command.until_shown(len(command.shown.strip()) + 1)
            states.append(valid_captions(path))
        expected = heard(lively_server, pcm)
        assert command.end() == expected
    states.append(valid_captions(path))
    assert states[-1] == expected
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(states))
    assert len(set(states)) > 2, "captions did not grow while the pipe was open"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("output", ["plain", "json"])
def test_an_interruption_ends_a_pipe_and_its_text_is_finished(
    lively_server: Any, clip: NDArray[np.int16], tmp_path: Path, output: str
):
    pcm, path = np.tile(clip, 2).tobytes(), tmp_path / "live.srt"
    options = ["--encoding", "pcm_s16le", "--captions", str(path), *(["--json"] if output == "json" else [])]
    with Process("stream", "-", "--url", lively_server.url, *options) as command:
        command.feed(pcm)
        while not valid_captions(path) if path.exists() else True:
            time.sleep(0.05)
        while command.unread():
            time.sleep(0.05)
        command.process.send_signal(signal.SIGINT)
        printed, errors = command.process.communicate(timeout=60)
    assert command.process.returncode == 130, errors
    text = json.loads(printed)["text"] if output == "json" else printed.decode().strip()
    assert text == heard(lively_server, pcm) == valid_captions(path)


def test_files_that_are_interrupted_are_not_gone_on_with(lively_server: Any, clip: NDArray[np.int16], tmp_path: Path):
    (tmp_path / "long.raw").write_bytes(np.tile(clip, 60).tobytes())
    options = ["--url", lively_server.url, "--encoding", "pcm_s16le", "--realtime", "--chunk-ms", "2000"]
    with Process("stream", str(tmp_path / "long.raw"), CLIP.as_posix(), *options) as command:
        command.until_shown(3)
        command.process.send_signal(signal.SIGINT)
        printed, errors = command.process.communicate(timeout=60)
    assert command.process.returncode == 130, errors
    assert len((command.shown + printed.decode()).splitlines()) == 1


async def test_pieces_are_paced_by_what_is_in_them(monkeypatch: pytest.MonkeyPatch):
    waited: list[float] = []

    async def wait_for(_interruption: Coroutine[Any, Any, bool], seconds: float) -> None:
        _interruption.close()
        waited.append(seconds)

    async def pieces() -> AsyncIterator[bytes]:
        for size in (3200, 32_000, 100):
            yield bytes(size)

    monkeypatch.setattr(cli.asyncio, "wait_for", wait_for)
    assert [len(piece) async for piece in cli._paced(pieces(), 32_000, asyncio.Event())] == [3200, 32_000, 100]
    assert waited == pytest.approx([0.1, 1.1, 1.103], abs=0.05)


async def test_pieces_that_are_left_when_interrupted_wait_no_longer():
    interrupted = asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        yield bytes(1)
        interrupted.set()
        yield bytes(10_000)

    async with asyncio.timeout(60):
        assert [len(piece) async for piece in cli._paced(pieces(), 10, interrupted)] == [1, 10_000]


def valid_captions(path: Path) -> str:
    """The text of a caption file, after FFmpeg and our own reading of its grammar agree on it."""
    content = path.read_text()
    clock = r"\d\d:\d\d:\d\d[,.]\d{3}"
    cue = rf"(\d+\n)?(?P<start>{clock}) --> (?P<end>{clock})\n(?P<text>[^\n]+)\n"
    grammar = rf"({cue.replace('?P<start>', '').replace('?P<end>', '').replace('?P<text>', '')}(\n|$))*"
    body = content.removeprefix("WEBVTT\n\n") if path.suffix == ".vtt" else content
    assert re.fullmatch(grammar, body) or content == "WEBVTT\n", content
    cues = list(re.finditer(cue, body))
    times = [t for c in cues for t in (c["start"], c["end"])]
    assert times == sorted(times) and all(c["start"] < c["end"] for c in cues)
    if cues:
        # What was read above, since the file itself may have grown meanwhile.
        with av.open(io.BytesIO(content.encode()), format=path.suffix[1:].replace("vtt", "webvtt")) as container:
            packets = [p for p in container.demux() if p.size]
        assert [bytes(p).decode() for p in packets] == [c["text"] for c in cues]
    return " ".join(c["text"] for c in cues)


def test_captions_are_valid_after_every_event(lively_server: Any, clip: NDArray[np.int16], tmp_path: Path):
    path = tmp_path / "every.srt"
    captions = Captions(path, 0.04)
    assert valid_captions(path) == ""
    said = ""
    for event in transcribe_stream([np.tile(clip, 2).tobytes()], lively_server.url):
        captions.push(event)
        said += event.delta if isinstance(event, Text) else ""
        assert said.strip().startswith(valid_captions(path))
    assert valid_captions(path) == said.strip()


def test_captions_that_cannot_be_written_leave_nothing(tmp_path: Path):
    (tmp_path / "taken.srt").mkdir()
    with pytest.raises(OSError, match="directory"):
        Captions(tmp_path / "taken.srt", 0.04)
    assert [path.name for path in tmp_path.iterdir()] == ["taken.srt"]


@pytest.mark.parametrize("suffix", [".srt", ".vtt"])
def test_cues_are_of_bounded_length_and_numbered_from_one_across_segments(tmp_path: Path, suffix: str):
    path = tmp_path / f"many{suffix}"
    captions, written = Captions(path, 0.04), srt if suffix == ".srt" else vtt
    segments = [spoken(0.0, 14, 0.1), spoken(10.0, 3, 3.0), spoken(30.0, 1, 1.0)]
    for segment in segments:
        captions.push(segment)
    assert path.read_text() == written(segments)
    cues = re.findall(r"(?:(\d+)\n)?\S+ --> \S+\n(.+)\n", path.read_text())
    assert [len(text.split()) for _, text in cues] == [12, 2, 2, 1, 1]
    assert [number for number, _ in cues] == (["1", "2", "3", "4", "5"] if suffix == ".srt" else [""] * 5)


def spoken(start: float, count: int, each_s: float) -> Segment:
    """A segment of `count` words."""
    times = [(start + k * each_s, start + (k + 1) * each_s) for k in range(count)]
    words = [Word(word=f"w{k}", start=s, end=e, confidence=0.9) for k, (s, e) in enumerate(times)]
    text = " ".join(word.word for word in words)
    return Segment(segment=0, text=text, start=times[0][0], end=times[-1][1], words=words)


def test_wrong_options_are_explained(lively_server: Any, tmp_path: Path):
    def run(*options: str) -> tuple[int, str]:
        done = subprocess.run(
            [COMMAND, "stream", "--url", lively_server.url, *options], capture_output=True, timeout=60, check=False
        )
        return done.returncode, " ".join(done.stderr.decode().split())

    assert run(str(CLIP), "--captions", "live.txt") == (2, "error: --captions needs a name that ends in .srt or .vtt")
    assert run(str(CLIP), str(CLIP), "--captions", "live.srt")[0] == 2
    assert run("--microphone", "--encoding", "mulaw")[0] == 2
    assert run(str(CLIP), "--encoding", "container") == (
        *(2, "error: --encoding is for raw audio: containers say themselves what they are"),
    )
    (tmp_path / "nowhere").touch()  # no directory
    code, errors = run(str(CLIP), "--captions", str(tmp_path / "nowhere" / "live.srt"))
    assert code == 1 and "nowhere" in errors
    missing = tmp_path / f"missing-{'x' * 90}.raw"
    code, errors = run(str(missing), "--encoding", "mulaw")
    assert code == 1 and f"error: {missing}: cannot be read" in errors  # its path is whole


async def test_what_a_source_raises_reaches_its_listener():
    def pieces() -> Iterator[bytes]:
        yield b"first"
        raise RuntimeError("broken")

    given = read_aside(pieces())
    assert await anext(given) == b"first"
    with pytest.raises(RuntimeError, match="broken"):
        await asyncio.wait_for(anext(given), 10)


def test_level():
    def sine(amplitude: float) -> bytes:
        return (amplitude * 32767 * np.sin(np.arange(1600) / 3)).astype("<i2").tobytes()

    assert level_db(b"") == level_db(bytes(3200)) == FLOOR_DB
    assert level_db(sine(1)) == pytest.approx(-3, abs=0.1)
    assert level_db(sine(0.1)) == pytest.approx(-23, abs=0.1)
    assert [level_meter(db).plain.count("▮") for db in (FLOOR_DB, -30, 0)] == [0, 15, 30]


@pytest.fixture
def fake_microphone(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment in which ALSA's default device gives the clip at the pace of a speaker, over and over."""
    alsa = Path("/usr/share/alsa/alsa.conf")
    if ctypes.util.find_library("portaudio") is None or not alsa.is_file():
        pytest.skip("needs PortAudio and ALSA, whose file device is the microphone here")
    os.mkfifo(tmp_path / "speech")
    device = f'pcm.!default {{ type file slave.pcm "null" file "/dev/null" infile "{tmp_path}/speech" format "raw" }}'
    (tmp_path / "asound.conf").write_text(f"<{alsa}>\n{device}\n")
    pipe = os.open(tmp_path / "speech", os.O_RDWR | os.O_NONBLOCK)  # stays, though PortAudio opens it more than once
    silent = threading.Event()

    def speak() -> None:
        pcm = CLIP.read_bytes()[44:]
        at = 0
        while not silent.wait(0.1):
            with contextlib.suppress(BlockingIOError):  # nobody listens
                at += os.write(pipe, pcm[at : at + 3200])
            at %= len(pcm)

    speaker = threading.Thread(target=speak)
    speaker.start()
    yield {**os.environ, "ALSA_CONFIG_PATH": str(tmp_path / "asound.conf"), "TERM": "xterm", "COLUMNS": "100"}
    silent.set()
    speaker.join()
    os.close(pipe)


def test_microphone_shows_level_and_text_until_interrupted(lively_server: Any, fake_microphone: dict[str, str]):
    """Like a person at a terminal: sees the meter move and text appear, presses Ctrl-C, gets the rest."""
    master, terminal = pty.openpty()
    arguments = [COMMAND, "stream", "--microphone", "--url", lively_server.url]
    ours = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
    process = subprocess.Popen(arguments, env=fake_microphone, start_new_session=True, **ours)
    os.close(terminal)
    screen, interrupted = "", False
    gives_up = time.monotonic() + 60
    while time.monotonic() < gives_up and select.select([master], [], [], 30)[0]:
        try:
            data = os.read(master, 65536)
        except OSError:  # the other end is closed
            break
        screen += data.decode(errors="replace")
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen)
        if not interrupted and "level ▮" in plain and re.search(r"[a-z]{3}", plain.replace("level", "")):
            process.send_signal(signal.SIGINT)
            interrupted = True
    os.close(master)
    process.send_signal(signal.SIGKILL)  # only where the test has failed is there anything left to kill
    assert process.wait() == 0 and interrupted and "Traceback" not in screen, screen


@pytest.mark.parametrize("vanishes", [True, False])
async def test_a_microphone_that_vanishes_ends_and_is_told(
    vanishes: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    class Device:
        """PortAudio's, which says that it is finished, from a thread of its own, whoever ended it."""

        def __init__(self, *_: object, callback: Any, finished_callback: Any, **__: object) -> None:
            self.finished = finished_callback

            def listen() -> None:
                callback(b"ab", 1, None, None)
                if vanishes:
                    finished_callback()

            threading.Thread(target=listen).start()

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None:
            self.finished()

    module = types.SimpleNamespace(RawInputStream=Device, PortAudioError=OSError)
    monkeypatch.setitem(sys.modules, "sounddevice", module)
    pieces = microphone_pieces(100)
    async with asyncio.timeout(10), contextlib.aclosing(pieces):
        assert await anext(pieces) == b"ab"
        if vanishes:
            assert [piece async for piece in pieces] == []
    await asyncio.sleep(0)
    assert ("the microphone is gone" in caplog.text) == vanishes


AWAY = """
import asyncio, os, signal, sys
from mocha_client import sources

async def main(chunk_ms, waiting_s, away_s):
    sources.WAITING_S = waiting_s
    pieces = sources.microphone_pieces(chunk_ms)
    heard = [await anext(pieces)]
    await asyncio.sleep(away_s)  # as where a connection is being replaced
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.sleep(0.2)
    heard += [piece async for piece in pieces]
    sys.stdout.buffer.write(b"".join(heard))

asyncio.run(main(*map(int, sys.argv[1:])))
"""


def said_while_away(fake_microphone: dict[str, str], chunk_ms: int, waiting_s: int, away_s: int) -> tuple[bytes, str]:
    """What the microphone gives to one who asks for nothing for a while and is interrupted then; and what it tells."""
    command = [sys.executable, "-c", AWAY, *map(str, (chunk_ms, waiting_s, away_s))]
    done = subprocess.run(command, env=fake_microphone, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr.decode()


def test_what_waits_to_be_sent_is_given_after_the_interruption(fake_microphone: dict[str, str]):
    audio, told = said_while_away(fake_microphone, chunk_ms=10, waiting_s=60, away_s=7)
    assert len(audio) / 32_000 > 6 and "lost" not in told


def test_more_than_can_wait_is_lost_and_told(fake_microphone: dict[str, str]):
    audio, told = said_while_away(fake_microphone, chunk_ms=10, waiting_s=1, away_s=3)
    (lost_s,) = map(float, re.findall(r"([\d.]+) s of speech were lost", told))
    assert 1 < len(audio) / 32_000 < 2 and 2 < len(audio) / 32_000 + lost_s < 10
    assert told.count("what is said now is lost") == 1


async def test_an_interruption_while_the_connection_is_being_replaced_loses_nothing(
    lively_server: Any, fake_microphone: dict[str, str]
):
    async with Proxy(lively_server.port) as proxy:
        with Process("stream", "--microphone", "--json", "--url", proxy.url, env=fake_microphone) as command:
            while not proxy.num_connections:  # noqa: ASYNC110 no event says so
                await asyncio.sleep(0.01)
            connected = time.monotonic()
            await asyncio.sleep(2)
            proxy.target = 1  # where nobody listens
            proxy.cut()
            lost_s = time.monotonic() - connected
            await asyncio.sleep(4)
            command.process.send_signal(signal.SIGINT)
            await asyncio.sleep(0.5)
            proxy.target = lively_server.port
            shown = await asyncio.to_thread(command.end)
    assert json.loads(shown)["characters"][-1]["time"] > lost_s + 2  # at its end the server hears a second of silence
