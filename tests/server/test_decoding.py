"""Files decoded in processes of their own: the same samples, and what breaks a decoder breaks nothing else."""

import asyncio
import io
import os
import resource
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import IO

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from mocha_server import audio, decoding
from mocha_server.audio import AudioError, Samples, decode_file
from mocha_server.decoding import IN_MEMORY_BYTES, decode_apart
from mocha_server.messages import ErrorCode
from mocha_server.stream import EngineError

FIXTURES = Path(__file__).parents[1] / "fixtures"
RATE = 16_000
MANY = 100_000_000
TOO_MUCH = "the file needs more memory than speech does"


async def heard(file: IO[bytes]) -> NDArray[np.float32]:
    return np.concatenate([block async for block in decode_apart(file, RATE)])


async def refusal(data: bytes) -> str:
    with pytest.raises(AudioError) as refused:
        await heard(io.BytesIO(data))
    assert refused.value.code in (ErrorCode.UNSUPPORTED_MEDIA, ErrorCode.EMPTY_AUDIO)
    return str(refused.value)


def encoded(codec: str, samples: NDArray[np.int16], name: str = "mp4", **options: str) -> bytes:
    """`samples` [N] at 16 kHz in a file of the format `name`."""
    file = io.BytesIO()
    with av.open(file, "w", format=name, options=options) as container:
        stream = container.add_stream(codec, rate=RATE, layout="mono")
        for at in range(0, len(samples), 1 << 16):
            frame = av.AudioFrame.from_ndarray(samples[None, at : at + (1 << 16)], format="s16", layout="mono")
            frame.sample_rate, frame.pts = RATE, at
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def silence(seconds: int) -> bytes:
    return encoded("flac", np.zeros(seconds * RATE, np.int16), "flac")


def changed(data: bytes, kind: bytes, offset: int, *numbers: int) -> bytes:
    """An MP4 file with other numbers in its first box of a kind, that many bytes after the box's name."""
    at = data.index(kind) + 4 + offset
    return data[:at] + struct.pack(f">{len(numbers)}I", *numbers) + data[at + 4 * len(numbers) :]


def children(pid: int | str) -> list[int]:
    """Processes that the process `pid` has started."""
    listed = [task.read_text().split() for task in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for part in listed for child in part]


def helper() -> int:
    """The process that forks, of which this process has one."""
    (found,) = [p for p in children("self") if b"mocha_server.decoding" in Path(f"/proc/{p}/cmdline").read_bytes()]
    return found


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("name", ["weather.flac", "weather.m4a", "weather.webm"])
async def test_the_same_samples_as_in_this_process(name: str):
    whole = np.concatenate(list(decode_file(str(FIXTURES / name), RATE)))
    data = (FIXTURES / name).read_bytes()
    spooled = tempfile.SpooledTemporaryFile(max_size=1 << 20)  # noqa: SIM115
    spooled.write(data)
    with spooled, (FIXTURES / name).open("rb") as opened:
        for file in (io.BytesIO(data), spooled, opened):
            assert np.array_equal(await heard(file), whole)


async def test_large_files_are_read_from_where_they_are():
    noise = np.random.default_rng(0).integers(-9000, 9000, 40 * RATE).astype(np.int16)
    data = encoded("pcm_s16le", noise, "wav")
    assert len(data) > IN_MEMORY_BYTES
    with tempfile.TemporaryFile() as file:
        file.write(data)
        assert np.array_equal(await heard(file), noise / np.float32(32768))


async def test_files_at_once_and_a_decoder_that_dies():
    async def first_of(blocks: AsyncIterator[Samples]) -> int:
        return len(await anext(blocks))

    async with aclosing(decode_apart(io.BytesIO(silence(120)), RATE)) as broken:
        await first_of(broken)
        (victim,) = children(helper())
        async with aclosing(decode_apart(io.BytesIO(silence(100)), RATE)) as whole:
            num_samples = await first_of(whole)
            os.kill(victim, signal.SIGSEGV)
            with pytest.raises(AudioError, match="breaks its decoder"):
                async for _ in broken:
                    pass
            async for block in whole:
                num_samples += len(block)
    assert num_samples == 100 * RATE


async def test_who_leaves_takes_the_decoder_along():
    async with aclosing(decode_apart(io.BytesIO(silence(120)), RATE)) as blocks:
        await anext(blocks)
        (decoder,) = children(helper())
    await until(lambda: decoder not in children(helper()))


async def test_another_helper_takes_the_place_of_one_that_died():
    await heard(io.BytesIO(silence(1)))
    died = helper()
    os.kill(died, signal.SIGKILL)
    await until(lambda: "State:\tZ" in Path(f"/proc/{died}/status").read_text())
    assert len(await heard(io.BytesIO(silence(1)))) == RATE
    assert helper() != died


SERVER = """
import asyncio, sys
from mocha_server.decoding import decode_apart

async def main():
    print(sum([len(block) async for block in decode_apart(open(sys.argv[1], "rb"), 16_000)]), flush=True)

for _ in sys.stdin:
    asyncio.run(main())
"""


async def test_a_helper_that_cannot_begin_is_no_fault_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decoding, "_helper", decoding._Helper())
    (broken := tmp_path / "python").write_text("#!/bin/sh\nsleep 0.5\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(EngineError, match="cannot decode files"):
        await heard(io.BytesIO(silence(1)))
    decoding._helper.close()


async def test_the_helper_runs_nothing_of_where_it_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "av.py").write_text("raise RuntimeError")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(decoding, "_helper", decoding._Helper())
    assert len(await heard(io.BytesIO(silence(1)))) == RATE
    decoding._helper.close()


async def test_without_free_descriptors_the_server_is_full_for_the_moment():
    await heard(io.BytesIO(silence(1)))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with io.BytesIO(silence(1)) as file:
        os.close(lowest_free := os.dup(0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        try:
            with pytest.raises(EngineError) as refused:
                await heard(file)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert refused.value.code is ErrorCode.SERVER_FULL
        assert len(await heard(file)) == RATE


async def test_the_helper_outlives_signals_but_not_its_server(tmp_path: Path):
    (tmp_path / "file.flac").write_bytes(silence(1))
    command = [sys.executable, "-c", SERVER, str(tmp_path / "file.flac")]
    server = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(b"\n")
    assert await server.stdout.readline() == b"16000\n"
    (started,) = children(server.pid)
    for number in (signal.SIGINT, signal.SIGTERM):  # as terminals and service managers send them to all there are
        os.kill(started, number)
    server.stdin.write(b"\n")
    assert await server.stdout.readline() == b"16000\n"
    assert children(server.pid) == [started]
    server.kill()
    await server.wait()
    await until(lambda: not Path(f"/proc/{started}").exists())


async def test_a_decoder_that_computes_without_end():
    program = "from mocha_server import decoding\ndecoding.MOST_S = 1\ndecoding._allow_time()\nwhile True: pass"
    async with asyncio.timeout(60):
        endless = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
        assert await endless.wait() == -signal.SIGXCPU


async def test_where_nothing_can_fork(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(os, "fork")
    monkeypatch.delattr(os, "pipe")
    assert len(await heard(io.BytesIO(silence(2)))) == 2 * RATE


async def test_an_index_of_far_more_samples_than_there_can_be():
    whole = (FIXTURES / "weather.m4a").read_bytes()
    assert await refusal(changed(whole, b"stsz", 4, 1, MANY))
    nested = whole.replace(b"moov", b"skip", 1) + b"".join(struct.pack(">I4s", 0, b"moov") for _ in range(20_000))
    assert await refusal(nested)


async def test_fragments_of_far_more_samples_than_there_can_be():
    tone = (9000 * np.sin(np.arange(64_000) / 9)).astype(np.int16)
    whole = encoded("aac", tone, movflags="frag_keyframe+empty_moov")
    assert len(await heard(io.BytesIO(whole))) > 60_000 and whole.count(b"trun") >= 1
    assert await refusal(changed(whole, b"trun", 4, MANY))


async def test_rates_that_need_more_memory_than_speech_does():
    wav = (FIXTURES / "weather.wav").read_bytes()
    at = wav.index(b"fmt ") + 12
    assert await refusal(wav[:at] + struct.pack("<II", 99_999_989, 2 * 99_999_989) + wav[at + 8 :]) == TOO_MUCH


async def test_a_text_that_says_what_to_hear_is_no_audio():
    assert "not a file of a known audio format" in await refusal(b"on: 200+10/80 300+1/10\nNOW on\n")


def test_audio_without_end(monkeypatch: pytest.MonkeyPatch):
    data = silence(60)
    assert sum(map(len, decode_file(io.BytesIO(data), RATE))) == 60 * RATE
    monkeypatch.setattr(audio, "LEAST_S", 1)
    monkeypatch.setattr(audio, "LEAST_BYTES_PER_S", len(data))
    with pytest.raises(AudioError, match="more audio than so few bytes can hold"):
        list(decode_file(io.BytesIO(data), RATE))
