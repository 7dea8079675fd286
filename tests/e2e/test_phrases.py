"""Phrases of one stream through every protocol: the same text everywhere, nobody else's changed, nothing left over."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from websockets.asyncio.client import connect

from mocha_model.phrases import PhraseBook
from mocha_model.recognizer import Recognizer

PHRASES = ["Qzqz", "jj xx"]
OVERWHELMING = 100.0  # nats per character: a phrase that can be written is


@pytest.fixture(scope="module")
def willing(lively: Recognizer) -> Recognizer:
    return Recognizer(lively.model, lively.tokenizer, phrases=PhraseBook(lively.tokenizer, OVERWHELMING))


@pytest.fixture
def server(make_server: Any, willing: Recognizer) -> Iterator[Any]:
    return make_server(willing)


async def native(server: Any, pcm: bytes, phrases: list[str]) -> str:
    async with connect(server.url) as socket:
        await socket.send(json.dumps({"type": "start", "phrases": phrases}))
        for start in range(0, len(pcm), 3_200):
            await socket.send(pcm[start : start + 3_200])
        await socket.send('{"type":"finish"}')
        said = [json.loads(message) async for message in socket]
    assert said[-1]["type"] == "end", said[-1]
    return " ".join(m["text"] for m in said if m["type"] == "segment")


async def vosk(server: Any, pcm: bytes, phrases: list[str]) -> str:
    texts = []
    async with connect(server.url.removesuffix("/v1/stream") + "/") as socket:
        await socket.send(json.dumps({"config": {"sample_rate": 16_000, "phrase_list": phrases}}))
        for start in range(0, len(pcm), 8_000):
            await socket.send(pcm[start : start + 8_000])
            texts.append(json.loads(await socket.recv()).get("text", ""))
        await socket.send('{"eof":1}')
        texts.append(json.loads(await socket.recv())["text"])
    return " ".join(filter(None, texts))


async def deepgram(server: Any, pcm: bytes, phrases: list[str]) -> str:
    query = [("encoding", "linear16"), ("sample_rate", "16000"), *(("keyterm", p) for p in phrases)]
    async with httpx.AsyncClient(timeout=60) as client:
        answer = await client.post(f"{server.http}/v1/listen", params=query, content=pcm)
    return str(answer.json()["results"]["channels"][0]["alternatives"][0]["transcript"])


async def deepgram_live(server: Any, pcm: bytes, phrases: list[str]) -> str:
    query = "&".join(["encoding=linear16&sample_rate=16000", *(f"keywords={p.replace(' ', '+')}:2" for p in phrases)])
    async with connect(f"{server.url.removesuffix('stream')}listen?{query}") as socket:
        for start in range(0, len(pcm), 3_200):
            await socket.send(pcm[start : start + 3_200])
        await socket.send('{"type":"CloseStream"}')
        said = [json.loads(message) async for message in socket]
    finals = [m["channel"]["alternatives"][0]["transcript"] for m in said if m.get("is_final")]
    return " ".join(filter(None, finals))


async def openai(server: Any, pcm: bytes, phrases: list[str]) -> str:
    header = bytes.fromhex("52494646ffffffff57415645666d74201000000001000100803e0000007d00000200100064617461")
    wav = header + len(pcm).to_bytes(4, "little") + pcm
    async with httpx.AsyncClient(timeout=60) as client:
        answer = await client.post(
            f"{server.http}/v1/audio/transcriptions", files={"file": ("a.wav", wav)}, data={"keywords[]": phrases}
        )
    return str(answer.json()["text"])


WAYS = {"native": native, "vosk": vosk, "deepgram": deepgram, "deepgram_live": deepgram_live, "openai": openai}


async def test_phrases_change_their_own_stream_and_leave_nothing(
    server: Any, willing: Recognizer, clip: NDArray[np.int16]
):
    pcm = clip.tobytes()
    plain = await native(server, pcm, [])
    favoured = await native(server, pcm, PHRASES)
    assert plain != favoured and {"qzqz", "jj"} & set(favoured.split()) and "qzqz" not in plain
    kinds = [([], plain), (PHRASES, favoured), ([], plain), (PHRASES, favoured)]
    found = await asyncio.gather(*(way(server, pcm, phrases) for way in WAYS.values() for phrases, _ in kinds))
    wanted = [text for _ in WAYS for _, text in kinds]
    for name, got, want in zip([n for n in WAYS for _ in kinds], found, wanted, strict=True):
        assert got == want, name
    assert await server.streams_left() == 0
    assert willing.phrases is not None and len(willing.phrases) == 0
    assert await native(server, pcm, []) == plain


async def test_phrases_of_who_leaves_without_a_word_are_forgotten(server: Any, willing: Recognizer):
    """In a server where nobody else says one either."""

    async def there_are(count: int) -> None:
        assert willing.phrases is not None
        for _ in range(600):
            if len(willing.phrases) == count:
                return
            await asyncio.sleep(0.1)
        pytest.fail(f"{len(willing.phrases)} lists of phrases, not {count}")

    async with connect(server.url) as socket:
        await socket.send(json.dumps({"type": "start", "phrases": PHRASES}))
        await there_are(1)
    await there_are(0)


async def test_too_many_and_too_long_phrases_are_refused(server: Any):
    for phrases in (["a"] * 201, ["b" * 61]):
        async with connect(server.url) as socket:
            await socket.send(json.dumps({"type": "start", "phrases": phrases}))
            said = json.loads(await socket.recv())
            assert said["code"] == "start_expected" and "phrases" in said["message"]
        async with httpx.AsyncClient() as client:
            form = {"files": {"file": ("a.wav", b"RIFF")}, "data": {"keywords[]": phrases}}
            answer = await client.post(f"{server.http}/v1/audio/transcriptions", **form)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "keywords")
            answer = await client.post(f"{server.http}/v1/listen", params={"keyterm": phrases}, content=b"x")
            assert answer.status_code == 400 and "keyterm" in answer.json()["err_msg"]
