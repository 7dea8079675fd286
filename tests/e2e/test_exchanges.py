"""What the comparison of exchanges sees and what it lets pass; the exchanges themselves are in each client's tests."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send
from tests.exchanges import Exchange, Line, Recorder, course, read

RECORDED = Path(__file__).parents[1] / "fixtures" / "exchanges"
KEY = "a-secret"


def named(kind: str, lines: list[Line]) -> int:
    return next(k for k, line in enumerate(lines) if line.get("received", {}).get("type") == kind)


def swapped(lines: list[Line]) -> None:
    at = named("input_audio_buffer.committed", lines)
    lines[at], lines[at + 1] = lines[at + 1], lines[at]


def a_message_less(lines: list[Line]) -> None:
    del lines[named("session.updated", lines)]


def a_key_less(lines: list[Line]) -> None:
    del lines[named("input_audio_buffer.committed", lines)]["received"]["previous_item_id"]


def another_status(lines: list[Line]) -> None:
    lines[-1]["code"] = 1011


@pytest.mark.parametrize("change", [swapped, a_message_less, a_key_less, another_status])
def test_what_goes_otherwise_is_seen(change: Callable[[list[Line]], None]):
    lines = read(RECORDED / "openai-python-realtime.jsonl")
    change(lines)
    assert course(lines) != course(read(RECORDED / "openai-python-realtime.jsonl"))


def test_other_text_and_other_speed_are_no_difference():
    lines = read(RECORDED / "openai-python-realtime.jsonl")
    delta = lines[named("conversation.item.input_audio_transcription.delta", lines)]
    lines.insert(named("conversation.item.created", lines), delta)
    for line in lines:
        line.pop("more", None)
        if "transcript" in (body := line.get("received", {})):
            body["transcript"] = "other words"
    assert course(lines) == course(read(RECORDED / "openai-python-realtime.jsonl"))


def test_messages_of_one_kind_are_counted():
    exchange = Exchange()
    for size in (8000, 8000, 3902):
        exchange.note(sent_bytes=size)
        exchange.note(received={"type": "x.delta", "delta": str(size)})
    exchange.note(received={"type": "done", "id": "42", "created": "2020-01-01"})
    assert exchange.lines == [
        {"sent_bytes": 8000, "more": 2},
        {"received": {"type": "x.delta", "delta": "8000"}, "more": 2},
        {"received": {"type": "done", "id": "<id>", "created": "<created>"}},
    ]


async def test_keys_are_not_kept():
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "websocket.accept", "subprotocol": "token"})
        await send({"type": "websocket.close", "code": 1000})

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        pass

    recorder = Recorder(app)
    recorder.exchange = found = Exchange()
    headers = [(b"authorization", f"Token {KEY}".encode())]
    scope: dict[str, Any] = {"type": "websocket", "path": "/v1/listen", "query_string": b"", "headers": headers}
    await recorder(scope | {"subprotocols": ["token", KEY]}, receive, send)
    assert found.lines[0] == {"websocket": "/v1/listen", "subprotocols": ["token", "<key>"]}
    assert KEY not in json.dumps(found.lines)


def test_the_recorded_ones_are_small():
    files = list(RECORDED.glob("*.jsonl"))
    assert len(files) > 10 and all(file.stat().st_size < 10_000 for file in files)
