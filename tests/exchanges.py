"""What clients and a test server say to each other, as JSON lines; and whether an exchange goes as a recorded one.

A line is a message as the client sees it: `request`, `response` and the `received` events of its stream for HTTP;
`websocket`, `accepted`, `sent`, `sent_bytes`, `received` and `closed` for WebSockets; `sent` and `received` for events
over TCP. `more` counts the messages of the same kind that followed in the same direction. Neither headers nor keys
are kept, and what is another each time is a placeholder.
"""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers, UploadFile
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from wyoming.event import Event, async_read_event, async_write_event

Line = dict[str, Any]
FROM_CLIENT = ("request", "websocket", "sent", "sent_bytes")
NAMES_KIND = ("type", "request", "response", "websocket", "accepted", "content_type", "closed", "code")
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
KNOWN_SUBPROTOCOLS = ("token", "bearer", "realtime")
LONG = 500  # characters; longer texts are audio


class Exchange:
    """The messages of one client, in the order in which they passed the server's door."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.num_open = 0  # connections

    def note(self, **line: Any) -> None:
        """Append a line, or count it with the last one of its direction if that is of the same kind."""
        line = without_volatile(line)
        same_way = [known for known in self.lines if from_client(known) == from_client(line)]
        if same_way and {"sent", "sent_bytes", "received"} & set(line) and shape(same_way[-1]) == shape(line):
            same_way[-1]["more"] = same_way[-1].get("more", 0) + 1
        else:
            self.lines.append(line)

    def wait(self, patience_s: float = 10) -> None:
        """Until all connections are over: a client sees its end before the server does."""
        until = time.monotonic() + patience_s
        while self.num_open and time.monotonic() < until:
            time.sleep(0.01)
        assert not self.num_open, "a connection is still open"

    def write(self, path: Path) -> None:
        """The lines, one of JSON each."""
        path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in self.lines))


def read(path: Path) -> list[Line]:
    """A recorded exchange."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def course(lines: list[Line]) -> dict[str, Any]:
    """What two exchanges have in common that go alike, whatever was said and when.

    In each direction: every kind of message, with its keys, and their order, in which repetitions count once and
    interim results are left out, since how many there are and what they overtake is a matter of speed.
    """
    found: dict[str, Any] = {}
    for way, ours in (("client", True), ("server", False)):
        going = [line for line in lines if from_client(line) == ours]
        kinds = sorted({shape(line) for line in going})
        order = "".join(chr(0x100 + kinds.index(shape(line))) for line in going if not is_interim(line))
        while (shorter := re.sub(r"(.+?)\1+", r"\1", order)) != order:
            order = shorter
        found[way] = {"kinds": kinds, "order": [kinds[ord(mark) - 0x100] for mark in order]}
    return found


def from_client(line: Line) -> bool:
    """Whether the client said it."""
    return any(name in line for name in FROM_CLIENT)


def is_interim(line: Line) -> bool:
    """Whether it brings text that a later message brings again."""
    body = line.get("received")
    if not isinstance(body, dict):
        return False
    return str(body.get("type")).endswith(("delta", "chunk")) or body.get("is_final") is False


def shape(line: Line) -> str:
    """The keys of a message, and what names its kind."""
    return json.dumps(_shape({k: v for k, v in line.items() if k != "more"}), ensure_ascii=False)


def _shape(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _shape(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        distinct = {json.dumps(_shape(inner, key)): _shape(inner, key) for inner in value}
        return [distinct[text] for text in sorted(distinct)]
    return value if isinstance(value, bool) or key in NAMES_KIND else "…"


def without_volatile(value: Any, key: str = "") -> Any:
    """`value` with placeholders for identifiers, dates, digests and audio."""
    if isinstance(value, dict):
        return {UUID.sub("<id>", name): without_volatile(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [without_volatile(inner, key) for inner in value]
    if isinstance(value, str):
        if key == "id" or key.endswith("_id"):
            return "<id>"
        if key in ("created", "sha256"):
            return f"<{key}>"
        return f"<{len(value)} characters>" if len(value) > LONG else UUID.sub("<id>", value)
    return value


class Recorder:
    """An ASGI application around another, which notes what passes while `exchange` is set."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.exchange: Exchange | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = self.exchange
        if exchange is None or scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        record = _http if scope["type"] == "http" else _websocket
        exchange.num_open += 1
        try:
            await record(exchange, self._app, scope, receive, send)
        finally:
            exchange.num_open -= 1


def _address(scope: Scope) -> str:
    query = scope["query_string"].decode()
    return f"{scope['path']}?{query}" if query else str(scope["path"])


def _json(text: str) -> Any:
    """`text` itself if it is none, such as the `[DONE]` of an event stream or what a client gets wrong."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


async def _http(exchange: Exchange, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    body, answer = bytearray(), bytearray()
    started: Message = {}

    async def heard() -> Message:
        message = await receive()
        body.extend(message.get("body", b""))
        if message["type"] == "http.request" and not message.get("more_body"):
            await _note_request(exchange, scope, bytes(body))
        return message

    async def said(message: Message) -> None:
        if message["type"] == "http.response.start":
            started.update(message)
        else:
            answer.extend(message.get("body", b""))
        await send(message)

    await app(scope, heard, said)
    media = Headers(raw=started["headers"]).get("content-type", "").partition(";")[0]
    line: Line = {"response": started["status"], "content_type": media}
    if media == "application/json":
        exchange.note(**line, body=json.loads(answer))
        return
    exchange.note(**line)
    for event in answer.decode().split("\n\n"):
        if event.startswith("data:"):
            exchange.note(received=_json(event.removeprefix("data:").strip()))


async def _note_request(exchange: Exchange, scope: Scope, body: bytes) -> None:
    media = Headers(scope=scope).get("content-type", "").partition(";")[0]
    line: Line = {"request": f"{scope['method']} {_address(scope)}", "content_type": media}
    if media == "multipart/form-data":

        async def again() -> Message:
            return {"type": "http.request", "body": body}

        async with Request(scope, again).form() as form:
            fields = {name: [_field(value) for value in form.getlist(name)] for name in form}
        exchange.note(**line, form=fields)
    else:
        exchange.note(**line, bytes=len(body))


def _field(value: str | UploadFile) -> str:
    return value if isinstance(value, str) else f"<{value.size} bytes>"


async def _websocket(exchange: Exchange, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    offered = [name if name in KNOWN_SUBPROTOCOLS else "<key>" for name in scope["subprotocols"]]
    exchange.note(websocket=_address(scope), **({"subprotocols": offered} if offered else {}))
    closed = False

    async def heard() -> Message:
        nonlocal closed
        message = await receive()
        if message["type"] == "websocket.disconnect" and not closed:
            closed = True
            exchange.note(closed="by the client", code=message["code"])
        elif (data := message.get("bytes")) is not None:
            exchange.note(sent_bytes=len(data))
        elif (text := message.get("text")) is not None:
            exchange.note(sent=_json(text))
        return message

    async def said(message: Message) -> None:
        nonlocal closed
        if message["type"] == "websocket.accept":
            exchange.note(accepted=message.get("subprotocol"))
        elif message["type"] == "websocket.send":
            exchange.note(received=_json(message["text"]))
        elif message["type"] == "websocket.close" and not closed:
            closed = True
            exchange.note(closed="by the server", code=message["code"])
        await send(message)

    await app(scope, heard, said)


@asynccontextmanager
async def relay(exchange: Exchange, port: int) -> AsyncIterator[int]:
    """A port before that of a Wyoming server, whose events are noted."""

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str) -> None:
        with suppress(ConnectionError):
            while event := await async_read_event(reader):
                exchange.note(**{way: _plain(event)})
                await async_write_event(event, writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pass_on(reader, up_writer, "sent"), pass_on(up_reader, writer, "received"))

    tasks: set[asyncio.Task[None] | None] = set()
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]
        await asyncio.gather(*(task for task in tasks if task))


def _plain(event: Event) -> dict[str, Any]:
    payload = {"payload_bytes": len(event.payload)} if event.payload else {}
    return {"type": event.type, **({"data": event.data} if event.data else {}), **payload}
