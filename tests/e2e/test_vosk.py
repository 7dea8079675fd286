"""vosk-server's protocol with `websockets`, as its own example clients use it: lockstep, one reply to each message."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.exchanges import read
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from mocha_model.recognizer import Recognizer

FIXTURES = Path(__file__).parents[1] / "fixtures"
CONFIG = '{ "config" : { "sample_rate" : %f } }'  # as vosk-server's test.py writes it: "16000.000000"
EOF = '{"eof" : 1}'
Replies = list[dict[str, Any]]


def address(server: Any) -> str:
    return f"ws://127.0.0.1:{server.port}"


async def lockstep(socket: Any, pieces: list[bytes | str]) -> Replies:
    """Send each piece and wait for its reply, as vosk's clients do."""
    replies = []
    for piece in pieces:
        await socket.send(piece)
        replies.append(json.loads(await socket.recv()))
    return replies


def text_of(replies: Replies) -> str:
    return " ".join(r["text"] for r in replies if r.get("text"))


async def test_a_file_in_lockstep_gives_the_native_text(any_server: Any, speech: Any, heard: Callable[..., Any]):
    expected = heard(any_server, speech.pcm)
    async with connect(address(any_server)) as socket:
        await socket.send(CONFIG % 16_000)
        replies = await lockstep(socket, [*speech.pieces(), EOF])
        with pytest.raises(ConnectionClosed):
            await socket.recv()
    assert text_of(replies) == expected.text
    assert all(set(r) in ({"partial"}, {"text"}, {"result", "text"}) for r in replies)
    found = [word for r in replies for word in r.get("result", [])]
    assert [(w["word"], w["start"], w["end"]) for w in found] == [
        (w["word"], w["start"], w["end"]) for w in expected.words
    ]
    assert await any_server.streams_left() == 0


async def test_a_recorded_exchange_goes_as_it_went(server: Any, speech: Any, heard: Callable[..., Any]):
    """What a client of vosk-server sent and received, in order: the words may be others now, the messages not."""
    lines = read(FIXTURES / "exchanges" / "vosk.jsonl")
    replies, at = [], 0
    async with connect(address(server)) as socket:
        for line in lines:
            if "received" in line:
                replies.append(json.loads(await socket.recv()))
                assert set(replies[-1]) in ({"partial"}, {"text"}, {"result", "text"})
            elif "sent_bytes" in line:
                await socket.send(speech.pcm[at : at + line["sent_bytes"]])
                at += line["sent_bytes"]
            else:
                await socket.send(line["sent"])
        with pytest.raises(ConnectionClosed):
            await socket.recv()
    assert at == len(speech.pcm) and text_of(replies) == heard(server, speech.pcm).text


async def test_partials_only_grow_and_come_with_their_audio(lively_server: Any, speech: Any):
    async with connect(address(lively_server)) as socket:
        await socket.send(CONFIG % 16_000)
        replies = await lockstep(socket, [*speech.pieces(3_200), EOF])
    before = ""
    for reply in replies:
        if "partial" in reply:
            assert reply["partial"].startswith(before)
            before = reply["partial"]
        else:
            assert reply["text"].startswith(before)
            before = ""
    with_text = [k for k, r in enumerate(replies) if r.get("partial")]
    assert with_text and with_text[0] < len(replies) // 2  # not held back until the end


async def test_the_default_rate_and_options(lively_server: Any, speech: Any, heard: Callable[..., Any]):
    expected = heard(lively_server, speech.pcm, sample_rate=8_000)
    async with connect(address(lively_server)) as socket:
        phrases = ["a", "b" * 61, *map(str, range(300))]  # more, and a longer one, than the server favours
        await socket.send(json.dumps({"config": {"words": False, "phrase_list": phrases, "model": "x"}}))
        replies = await lockstep(socket, [*speech.pieces(), EOF])
    assert text_of(replies) == expected.text
    assert all(set(r) in ({"partial"}, {"text"}) for r in replies)


async def test_a_second_config_changes_what_it_names(lively_server: Any, speech: Any, heard: Callable[..., Any]):
    async with connect(address(lively_server)) as socket:
        await socket.send(CONFIG % 16_000)
        await socket.send('{"config":{"words":false}}')
        replies = await lockstep(socket, [*speech.pieces(), EOF])
    assert text_of(replies) == heard(lively_server, speech.pcm).text
    assert not any("result" in reply for reply in replies)


async def test_alternatives(lively_server: Any, speech: Any, heard: Callable[..., Any]):
    async with connect(address(lively_server)) as socket:
        await socket.send('{"config":{"sample_rate":16000,"max_alternatives":3}}')
        replies = await lockstep(socket, [speech.pcm, EOF])
    best = [r["alternatives"][0] for r in replies if "alternatives" in r]
    assert " ".join(b["text"] for b in best) == heard(lively_server, speech.pcm).text
    assert {"confidence", "text", "result"} == set(best[-1])


async def test_reset_ends_an_utterance_and_stays_open(any_server: Any, speech: Any, heard: Callable[..., Any]):
    expected = heard(any_server, speech.pcm)
    async with connect(address(any_server)) as socket:
        await socket.send(CONFIG % 16_000)
        first = await lockstep(socket, [*speech.pieces(), '{"reset":1}'])
        second = await lockstep(socket, [*speech.pieces(), EOF])
    assert text_of(first) == text_of(second) == expected.text
    starts = [[w["start"] for r in replies for w in r.get("result", [])] for replies in (first, second)]
    assert np.allclose(np.array(starts[1]) - np.array(starts[0]), speech.seconds, atol=2e-3)


async def test_nothing_said(server: Any):
    async with connect(address(server)) as socket:
        assert await lockstep(socket, [EOF]) == [{"text": ""}]
    async with connect(address(server)) as socket:
        assert await lockstep(socket, [b"", '{"reset" : 1}', EOF]) == [{"partial": ""}, {"text": ""}, {"text": ""}]


@pytest.mark.parametrize(
    "bad",
    [
        "hello",
        "[]",
        "{}",
        '{"conf":{}}',
        '{"type":"start"}',
        '{"config":{"sample_rate":1}}',
        '{"config":{"sample_rate":"x"}}',
        '{"config":7}',
    ],
)
async def test_bad_text_is_an_error_and_closes(lively_server: Any, bad: str):
    async with connect(address(lively_server)) as socket:
        await socket.send(bad)
        reply = json.loads(await socket.recv())
        assert reply["code"] == "invalid_message" and reply["error"]
        with pytest.raises(ConnectionClosed) as closed:
            await socket.recv()
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008
    assert await lively_server.streams_left() == 0


async def test_the_rate_cannot_change_under_way(lively_server: Any):
    async with connect(address(lively_server)) as socket:
        await lockstep(socket, [bytes(3200)])
        assert (await lockstep(socket, [CONFIG % 16_000]))[0]["code"] == "invalid_message"


async def test_the_rate_may_change_between_utterances(lively_server: Any, speech: Any, heard: Callable[..., Any]):
    async with connect(address(lively_server)) as socket:
        await lockstep(socket, [bytes(3200), '{"reset":1}'])
        await socket.send(CONFIG % 16_000)
        replies = await lockstep(socket, [*speech.pieces(), EOF])
    assert text_of(replies) == heard(lively_server, speech.pcm).text


async def test_a_full_server_says_so(make_server: Any, lively: Recognizer):
    server = make_server(lively, max_streams=1)
    async with connect(address(server)) as first:
        assert "partial" in (await lockstep(first, [bytes(3200)]))[0]
        async with connect(address(server)) as second:
            assert json.loads(await second.recv())["code"] == "server_full"
            with pytest.raises(ConnectionClosed):
                await second.recv()
            assert second.close_code == 1013
        assert "partial" in (await lockstep(first, [bytes(3200)]))[0]


async def test_an_idle_client_is_told(make_server: Any, lively: Recognizer):
    async with connect(address(make_server(lively, idle_s=0.2))) as socket:
        assert json.loads(await socket.recv())["code"] == "idle"


def test_the_page_is_still_there(lively_server: Any):
    assert "mocha-asr" in httpx.get(f"{lively_server.http}/").text
