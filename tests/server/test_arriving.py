"""Containers decoded as they arrive: the same samples however they are cut, soon, and nothing left behind."""

import asyncio
import os
import resource
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.server.test_decoding import FIXTURES, RATE, children, encoded, helper, until

from mocha_server import audio
from mocha_server.audio import AudioError, decode_file
from mocha_server.decoding import ArrivingDecoder
from mocha_server.incoming import Incoming
from mocha_server.messages import Encoding, ErrorCode, Finish, Start
from mocha_server.stream import EngineError

NAMES = ["weather.webm", "weather.ogg", "weather.mp3", "weather.flac", "weather.wav"]  # weather.opus is weather.ogg
TONE = (9000 * np.sin(np.arange(64_000) / 9)).astype(np.int16)


async def joined(parts: AsyncIterator[bytes]) -> NDArray[np.float32]:
    return np.frombuffer(b"".join([part async for part in parts]), np.float32)


async def heard(data: bytes, size: int = 1000) -> tuple[list[int], NDArray[np.float32]]:
    """How many samples there were after each piece of so many bytes, and all of them."""
    decoder, parts, counts = ArrivingDecoder(RATE), [], []
    try:
        for at in range(0, len(data), size):
            parts.append(await joined(decoder.push(data[at : at + size])))
            counts.append(sum(map(len, parts)))
        parts.append(await joined(decoder.finish()))
    finally:
        decoder.close()
    return counts, np.concatenate(parts)


def whole(name: str) -> NDArray[np.float32]:
    return np.concatenate(list(decode_file(str(FIXTURES / name), RATE)))


@pytest.mark.parametrize("name", NAMES)
async def test_the_samples_are_those_of_the_file_however_it_is_cut(name: str):
    data, expected = (FIXTURES / name).read_bytes(), whole(name)
    for size in (1 if len(data) < 20_000 else 37, 1001, len(data)):
        _, samples = await heard(data, size)
        assert np.array_equal(samples[: len(expected)], expected)
        assert not samples[len(expected) :].any()  # of MP3, what its encoder added: 25 ms that a file says are none


@pytest.mark.parametrize(
    ("name", "first_s", "behind_s"),
    [
        ("weather.webm", 0.3, 0.6),
        ("weather.ogg", 1.3, 1.4),  # whose pages are a second
        ("weather.mp3", 0.6, 0.6),
        ("weather.flac", 1.3, 1.3),  # FFmpeg wants to see ten headers
        ("weather.wav", 2.2, 2.2),  # FFmpeg looks for S/PDIF in 64 KiB
    ],
)
async def test_samples_come_soon(name: str, first_s: float, behind_s: float):
    data = (FIXTURES / name).read_bytes()
    counts, samples = await heard(data, 100)
    sent = [min(len(data), 100 * (n + 1)) * len(samples) / len(data) for n in range(len(counts))]
    assert next(s for s, count in zip(sent, counts, strict=True) if count) < first_s * RATE
    assert max(s - count for s, count in zip(sent, counts, strict=True)) < behind_s * RATE


@pytest.mark.parametrize(
    ("codec", "name", "options"),
    [("aac", "adts", {}), ("aac", "mp4", {"movflags": "frag_every_frame+empty_moov"}), ("aac", "mpegts", {})],
)
async def test_other_containers_that_can_be_read_from_their_beginning(codec: str, name: str, options: dict[str, str]):
    counts, samples = await heard(encoded(codec, TONE, name, **options), 200)
    assert len(samples) > len(TONE) - 2000 and next(n for n, count in enumerate(counts) if count) < len(counts) / 4
    assert np.abs(samples[8000:48_000]).max() == pytest.approx(9000 / 32768, rel=0.1)


async def refusal(data: bytes) -> AudioError:
    with pytest.raises(AudioError) as refused:
        await heard(data)
    return refused.value


async def test_what_cannot_be_decoded_while_it_arrives():
    error = await refusal((FIXTURES / "weather.m4a").read_bytes())
    assert error.code is ErrorCode.UNSUPPORTED_MEDIA and "index at the end" in str(error)
    error = await refusal((FIXTURES / "document.wav").read_bytes())
    assert error.code is ErrorCode.UNSUPPORTED_MEDIA and "encoding" in str(error)
    error = await refusal((FIXTURES / "weather.webm").read_bytes()[:450])
    assert error.code is ErrorCode.EMPTY_AUDIO


async def test_noise_is_refused_before_much_of_it_came():
    noise = np.random.default_rng(0).bytes(33_000)
    decoder = ArrivingDecoder(RATE)
    with pytest.raises(AudioError) as refused:
        await joined(decoder.push(noise))
    assert refused.value.code is ErrorCode.UNSUPPORTED_MEDIA
    assert len(await joined(decoder.push(noise))) == 0  # it is closed


async def test_damage_is_passed_over():
    data = bytearray((FIXTURES / "weather.mp3").read_bytes())
    data[7000:7200] = bytes(200)
    _, samples = await heard(bytes(data))
    assert len(samples) > 50_000


async def test_what_follows_the_end_of_a_container_is_passed_over():
    _, samples = await heard((FIXTURES / "weather.wav").read_bytes() + bytes(200_000))
    assert np.array_equal(samples, whole("weather.wav"))


async def test_more_audio_than_so_few_bytes_can_hold(monkeypatch: pytest.MonkeyPatch):
    data = encoded("flac", np.zeros(60 * RATE, np.int16), "flac")
    pieces = iter([data[at : at + 100] for at in range(0, len(data), 100)])
    monkeypatch.setattr(audio, "LEAST_S", 1)
    monkeypatch.setattr(audio, "LEAST_BYTES_PER_S", len(data))
    with pytest.raises(AudioError, match="more audio than so few bytes can hold"):
        list(audio.decode_arriving(lambda size: next(pieces, b""), RATE))


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("how", ["finished", "closed", "refused", "never begun"])
async def test_nothing_is_left_of_a_decoder(how: str):
    await heard((FIXTURES / "weather.webm").read_bytes())
    await asyncio.sleep(0.1)  # until what was closed before is
    await until(lambda: not children(helper()))
    before, decoder = descriptors(), ArrivingDecoder(RATE)
    if how != "never begun":
        await joined(decoder.push((FIXTURES / "weather.webm").read_bytes()[:5000]))
        assert len(children(helper())) == 1 and descriptors() > before
    if how == "finished":
        await joined(decoder.finish())
    elif how == "refused":
        os.kill(children(helper())[0], signal.SIGSEGV)
        with pytest.raises(AudioError, match="breaks its decoder"):
            await joined(decoder.push(b"more"))
    else:
        decoder.close()
    await until(lambda: not children(helper()) and descriptors() <= before)


async def test_a_task_that_is_cancelled_while_it_waits_for_samples():
    decoder = ArrivingDecoder(RATE)
    await joined(decoder.push((FIXTURES / "weather.webm").read_bytes()[:5000]))
    (process,) = children(helper())
    os.kill(process, signal.SIGSTOP)
    waiting = asyncio.create_task(joined(decoder.push(b"more")))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    decoder.close()
    os.kill(process, signal.SIGCONT)
    await until(lambda: not children(helper()))


async def test_without_free_descriptors_the_server_is_full_for_the_moment():
    await heard((FIXTURES / "weather.webm").read_bytes())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(lowest_free := os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        with pytest.raises(EngineError) as refused:
            await joined(ArrivingDecoder(RATE).push(b"OggS"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert refused.value.code is ErrorCode.SERVER_FULL


async def test_where_nothing_can_fork_it_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(os, "fork")
    with pytest.raises(EngineError, match="cannot decode live audio"):
        await joined(ArrivingDecoder(RATE).push(b"OggS"))


async def test_sessions_are_told_of_samples_as_they_take_them():
    incoming = Incoming(RATE)
    told = incoming.started(Start(encoding=Encoding.CONTAINER, sample_rate=48_000, channels=2, phrases=("a",)))
    assert told == Start(encoding=Encoding.PCM_F32LE, sample_rate=RATE, phrases=("a",))
    given = [part async for part in incoming.given((FIXTURES / "weather.ogg").read_bytes())]
    rest = [part async for part in incoming.given(Finish())]
    assert np.array_equal(np.frombuffer(b"".join([*given, *rest[:-1]]), np.float32), whole("weather.ogg"))  # type: ignore[list-item]
    assert rest[-1] == Finish()
    assert [part async for part in incoming.given(b"more")] == [b"more"]  # which the session refuses
    incoming.close()
    async with aclosing(Incoming(RATE).given(bytes(1 << 17))) as pieces:
        assert sum([len(piece) async for piece in pieces]) == 1 << 17
