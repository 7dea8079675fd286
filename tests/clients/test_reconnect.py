"""`StreamingClient` when its connection breaks: nothing received is taken back, no audio that gave text heard twice."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.proxy import Proxy
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from mocha_client import client as streaming
from mocha_client import connection
from mocha_client.client import ClientError, Event, StreamingClient
from mocha_client.continuity import Continuity, Reconnected
from mocha_model.recognizer import Recognizer
from mocha_server.messages import Character, End, Error, ErrorCode, Ready, Segment, Start, Text

RATE, FRAME_S = 16_000, 0.04
READY = Ready(session="a", model="m", sample_rate=RATE, frame_ms=1000 * FRAME_S, latency_ms=25, chunk_width=2)


@pytest.fixture
def speech(clip: NDArray[np.int16]) -> NDArray[np.int16]:
    return np.tile(clip, 2)


@pytest.fixture
async def proxy(lively_server: Any) -> AsyncIterator[Proxy]:
    async with Proxy(lively_server.port) as running:
        yield running


def characters(events: list[Event]) -> list[Character]:
    return [c for event in events if isinstance(event, Text) for c in event.characters]


def check_whole(events: list[Event]) -> None:
    """What holds of every stream, however often it was broken."""
    segments = [e for e in events if isinstance(e, Segment)]
    end = events[-1]
    assert isinstance(end, End) and end.segments == len(segments)
    assert [s.segment for s in segments] == list(range(len(segments)))
    assert "".join(e.delta for e in events if isinstance(e, Text)).strip() == " ".join(s.text for s in segments)
    frames = [c.frame for c in characters(events)]
    assert frames == sorted(frames)
    for s in segments:
        assert " ".join(w.word for w in s.words) == s.text
        assert s.start == s.words[0].start and s.end == s.words[-1].end


async def native(url: str, samples: NDArray[np.int16]) -> list[Event]:
    async with StreamingClient(url) as client:
        await client.send(samples.tobytes())
        await client.finish()
        return [event async for event in client]


async def broken_stream(client: StreamingClient, clip: NDArray[np.int16], breaking: Any) -> list[Event]:
    """All events of `clip`, the connection broken once after some text."""
    data = clip.tobytes()
    await client.send(data[: len(data) // 2])
    events: list[Event] = []
    async for event in client:
        events.append(event)
        if characters(events):
            break
    await breaking()
    await client.send(data[len(data) // 2 :])
    await client.finish()
    return events + [event async for event in client]


async def test_a_new_connection_continues_where_text_ended(lively_server: Any, proxy: Proxy, speech: NDArray[np.int16]):
    async def cut() -> None:
        proxy.cut()

    async with StreamingClient(proxy.url) as client:
        events = await broken_stream(client, speech, cut)
    check_whole(events)
    (at,) = [number for number, event in enumerate(events) if isinstance(event, Reconnected)]
    before, again, after = events[:at], events[at], events[at + 1 :]
    assert isinstance(again, Reconnected) and again.missing == 0
    assert again.time == pytest.approx((characters(before)[-1].frame + 1) * FRAME_S)
    expected = await native(lively_server.url, speech[round(again.time * RATE) :])
    shift = round(again.time / FRAME_S)
    assert [(c.text, c.frame - shift) for c in characters(after)] == [(c.text, c.frame) for c in characters(expected)]
    assert [e.words[0].start - again.time for e in after if isinstance(e, Segment)] == pytest.approx(
        [e.words[0].start for e in expected if isinstance(e, Segment)], abs=2e-3
    )
    assert events[-1].duration == pytest.approx(len(speech) / RATE, abs=1e-3)  # type: ignore[union-attr]


async def test_another_server_takes_over_when_one_stops(
    make_server: Any, lively: Recognizer, speech: NDArray[np.int16]
):
    first, second = make_server(lively), make_server(lively)
    async with Proxy(first.port) as proxy, StreamingClient(proxy.url) as client:

        async def stop() -> None:
            proxy.target = second.port
            await asyncio.to_thread(first.stop)

        events = await broken_stream(client, speech, stop)
    check_whole(events)
    assert sum(isinstance(e, Reconnected) for e in events) == 1 and proxy.num_connections == 2


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux says that a connection is stalled")
async def test_a_connection_that_takes_nothing_any_more_is_replaced(
    lively_server: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(connection, "STALLED_MS", 1000)
    async with Proxy(lively_server.port, stall_after=100_000) as proxy, StreamingClient(proxy.url) as client:
        sending = asyncio.create_task(client.send(bytes(1 << 26)))  # more than sockets hold on their way
        async for event in client:
            if isinstance(event, Reconnected):
                break
        sending.cancel()
        assert proxy.num_connections == 2


async def test_a_server_that_says_nothing_after_the_finish_is_left(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(streaming, "SILENT_S", 0.2)
    num_streams = 0

    async def silent_once(socket: ServerConnection) -> None:
        nonlocal num_streams
        num_streams += 1
        await socket.send(READY.model_dump_json())
        if num_streams > 1:
            await socket.send(End(segments=0, duration=0).model_dump_json())
        await socket.wait_closed()

    async with serve(silent_once, "127.0.0.1", 0) as server, asyncio.timeout(10):
        port = next(iter(server.sockets)).getsockname()[1]
        async with StreamingClient(f"ws://127.0.0.1:{port}/") as client:
            events: list[Event] = []

            async def listen() -> None:
                events.extend([event async for event in client])

            listener = asyncio.create_task(listen())
            await asyncio.sleep(0.5)
            assert not client._restoring and not events  # before the finish there may be nothing to say
            await client.finish()
            await listener
    assert [type(event) for event in events] == [Reconnected, End]


async def test_little_audio_is_on_its_way_to_a_server_that_is_behind():
    left = asyncio.Event()

    async def behind(socket: ServerConnection) -> None:
        await socket.send(READY.model_dump_json())
        await left.wait()
        socket.transport.abort()

    async with serve(behind, "127.0.0.1", 0, max_queue=1, compression=None) as server, asyncio.timeout(6):
        port = next(iter(server.sockets)).getsockname()[1]
        async with StreamingClient(f"ws://127.0.0.1:{port}/") as client:
            num_bytes = 0
            with suppress(TimeoutError):
                while True:
                    async with asyncio.timeout(0.5):
                        await client.send(bytes(1 << 15))
                        num_bytes += 1 << 15
        left.set()
    assert num_bytes < 1.5e6


async def test_one_task_sends_while_another_iterates_and_connections_break(proxy: Proxy, clip: NDArray[np.int16]):
    data = np.tile(clip, 3).tobytes()

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(data), 20_001):
            yield data[at : at + 20_001]
            await asyncio.sleep(0.02)

    events: list[Event] = []
    next_cut = 4
    async with StreamingClient(proxy.url) as client:
        async for event in client.transcribe(pieces()):
            events.append(event)
            if len(characters(events)) > next_cut:
                next_cut = len(characters(events)) + 8
                if proxy.num_connections < 4:
                    proxy.cut()
    check_whole(events)
    assert sum(isinstance(e, Reconnected) for e in events) >= 3


async def test_what_is_sent_while_a_connection_is_restored_comes_after_what_is_sent_again(
    lively_server: Any, proxy: Proxy, clip: NDArray[np.int16]
):
    quiet = np.zeros(200 * RATE, np.int16)  # gives hardly any text, so that more is sent again than sockets buffer
    pieces = np.array_split(np.tile(clip, 2), 6)
    async with StreamingClient(proxy.url) as client:
        await client.send(quiet.tobytes())
        events: list[Event] = []

        async def listen() -> None:
            events.extend([event async for event in client])

        listener = asyncio.create_task(listen())
        first = client.ready
        proxy.cut()
        while client.ready is first:  # noqa: ASYNC110 no event says so
            await asyncio.sleep(0.001)
        for piece in pieces:  # the quiet minutes are on their way meanwhile
            await client.send(piece.tobytes())
        await client.finish()
        await asyncio.wait_for(listener, 60)
    check_whole(events)
    (at,) = [number for number, event in enumerate(events) if isinstance(event, Reconnected)]
    again, after = events[at], characters(events[at + 1 :])
    assert isinstance(again, Reconnected) and again.time < 100
    expected = await native(lively_server.url, np.concatenate([quiet, *pieces])[round(again.time * RATE) :])
    shift = round(again.time / FRAME_S)
    assert [(c.text, c.frame - shift) for c in after] == [(c.text, c.frame) for c in characters(expected)]


async def test_a_stream_that_was_idle_goes_on_with_who_sends_again(
    make_server: Any, lively: Recognizer, clip: NDArray[np.int16]
):
    url = make_server(lively, idle_s=0.3).url
    async with asyncio.timeout(20):
        async with StreamingClient(url) as client:
            await client.send(clip.tobytes())
            events: list[Event] = []

            async def listen() -> None:
                events.extend([event async for event in client])

            listener = asyncio.create_task(listen())
            while not client._restoring:  # noqa: ASYNC110 no event says so
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            await client.send(clip.tobytes())
            await client.finish()
            await listener
        check_whole(events)
        assert sum(isinstance(event, Reconnected) for event in events) == 1
        async with StreamingClient(url) as client:
            listener = asyncio.create_task(anext(aiter(client)))
            while not client._restoring:  # noqa: ASYNC110 no event says so
                await asyncio.sleep(0.01)
        with pytest.raises(ClientError, match="was closed"):
            await listener
        async with StreamingClient(url, reconnect_s=0.2) as client:
            with pytest.raises(ClientError) as caught:
                await anext(aiter(client))
        assert caught.value.code is ErrorCode.IDLE


async def test_servers_that_stop_long_after_each_other(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(streaming, "STOOD_S", 0.3)
    stops = Error(code=ErrorCode.INTERNAL, message="the server stops").model_dump_json()
    sessions: list[ServerConnection] = []

    async def stopping(socket: ServerConnection) -> None:
        sessions.append(socket)
        await socket.send(READY.model_dump_json())
        await asyncio.sleep(0.8)
        if len(sessions) < 3:
            await socket.send(stops)
        else:
            await socket.send(End(segments=0, duration=0).model_dump_json())

    async with serve(stopping, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        async with StreamingClient(f"ws://127.0.0.1:{port}/", reconnect_s=0.5) as client:
            events = [event async for event in client]
    assert [type(event) for event in events] == [Reconnected, Reconnected, End]


@pytest.mark.parametrize("beginning", [False, True], ids=["a stream under way", "a new one"])
async def test_a_full_server_may_have_room_soon(beginning: bool):
    full = Error(code=ErrorCode.SERVER_FULL, message="all streams are in use").model_dump_json()
    sessions: list[ServerConnection] = []

    async def busy(socket: ServerConnection) -> None:
        sessions.append(socket)
        if len(sessions) == 1:
            for message in (READY.model_dump_json(), *([] if beginning else [full])):
                await socket.send(message)
        elif len(sessions) == 2 and beginning:
            await socket.send(full)
        else:
            for message in (READY, End(segments=0, duration=0)):
                await socket.send(message.model_dump_json())

    async with serve(busy, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        async with StreamingClient(f"ws://127.0.0.1:{port}/") as client:
            events = [event async for event in client]
    assert [type(event) for event in events] == [Reconnected, End]
    assert len(sessions) == (3 if beginning else 2)


async def test_what_a_connection_brought_before_it_was_lost_is_given():
    sessions: list[ServerConnection] = []

    async def leaving(socket: ServerConnection) -> None:
        sessions.append(socket)
        last = text(5, "ab") if len(sessions) == 1 else End(segments=0, duration=0)
        for message in (READY, last):
            await socket.send(message.model_dump_json())

    async with serve(leaving, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        async with StreamingClient(f"ws://127.0.0.1:{port}/") as client:
            first = client.ready
            while client.ready is first:  # who sends is the one to find that the connection is lost
                await client.send(bytes(2))
                await asyncio.sleep(0)
            events = [event async for event in client]
    assert [type(event) for event in events] == [Text, Segment, Reconnected, End]


async def test_what_is_open_when_the_stream_fails_is_a_segment():
    async def failing(socket: ServerConnection) -> None:
        for message in (READY, text(5, "ab"), Error(code=ErrorCode.INVALID_AUDIO, message="not finite")):
            await socket.send(message.model_dump_json())

    events: list[Event] = []
    async with serve(failing, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        async with StreamingClient(f"ws://127.0.0.1:{port}/") as client:

            async def listen() -> None:
                async for event in client:
                    events.append(event)

            with pytest.raises(ClientError, match="not finite"):
                await listen()
    assert [type(event) for event in events] == [Text, Segment]


async def test_who_leaves_while_the_connection_is_restored_leaves_none():
    sessions: list[ServerConnection] = []
    left = asyncio.Event()

    async def loses(socket: ServerConnection) -> None:
        sessions.append(socket)
        if len(sessions) > 1:
            await left.wait()
        await socket.send(READY.model_dump_json())
        if len(sessions) > 1:
            await socket.wait_closed()

    async with serve(loses, "127.0.0.1", 0) as server, asyncio.timeout(5):
        port = next(iter(server.sockets)).getsockname()[1]
        async with StreamingClient(f"ws://127.0.0.1:{port}/") as client:
            listener = asyncio.create_task(anext(aiter(client)))
            while len(sessions) < 2:  # noqa: ASYNC110 no event says so
                await asyncio.sleep(0.01)
        left.set()
        await asyncio.gather(listener, return_exceptions=True)
        await sessions[1].wait_closed()


async def test_a_loss_long_after_another_has_its_own_time(proxy: Proxy, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(streaming, "STOOD_S", 0.3)
    async with StreamingClient(proxy.url, reconnect_s=0.5) as client:
        events: list[Event] = []

        async def listen() -> None:
            events.extend([event async for event in client])

        listener = asyncio.create_task(listen())
        for lost in range(3):  # nobody speaks, so no text comes in between
            first = client.ready
            proxy.cut()
            while client.ready is first:
                assert not listener.done(), lost
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.6)
        await client.finish()
        await asyncio.wait_for(listener, 30)
    assert sum(isinstance(event, Reconnected) for event in events) == 3


async def test_a_lost_server_is_given_up(proxy: Proxy, clip: NDArray[np.int16]):
    for reconnect_s in (0.0, 0.5):
        async with StreamingClient(proxy.url, reconnect_s=reconnect_s) as client:
            await client.send(clip.tobytes())
            target, proxy.target = proxy.target, 9
            proxy.cut()
            with pytest.raises(ClientError, match="connection was lost"):
                _ = [event async for event in client]
            with pytest.raises(ClientError, match="connection was lost"):
                await client.send(clip.tobytes())
            proxy.target = target


def text(frame: int, letters: str = "a") -> Text:
    return Text(
        segment=0,
        delta=letters,
        characters=[
            Character(text=c, frame=frame, time=frame * FRAME_S + 0.025, p=0.8, q=0.5, chunk=[1.0]) for c in letters
        ],
    )


@given(st.lists(st.binary(max_size=50_000), max_size=8), st.integers(0, 40), st.floats(0.1, 3))
def test_what_is_kept_follows_what_gave_text(pieces: list[bytes], frame: int, keep_s: float):
    continuity = Continuity(Start(), keep_s)
    continuity.ready(READY)
    for number, piece in enumerate(pieces):
        continuity.sent(piece)
        if number == 0:
            continuity.received(text(frame))
    sent = b"".join(pieces)
    reconnected, position = continuity.resume()
    rest = continuity.audio(position, 1 << 30)
    assert sent.endswith(rest) and position == len(sent) - len(rest)
    heard_s = (frame + 1) * FRAME_S if pieces else 0.0
    assert reconnected.time == pytest.approx(heard_s + reconnected.missing, abs=2e-3)
    if reconnected.time <= len(sent) / 2 / RATE:
        assert position == pytest.approx(reconnected.time * 2 * RATE, abs=64)
    assert (len(sent) - position) / 2 / RATE <= keep_s + 1 / RATE
    if (len(sent) / 2 / RATE) - heard_s <= keep_s - 1 / RATE:
        assert reconnected.missing == 0


def test_the_open_segment_ends_where_the_connection_was_lost():
    continuity = Continuity(Start(), 10)
    continuity.ready(READY)
    continuity.sent(bytes(2 * RATE * 4))
    assert continuity.lost() is None
    continuity.received(text(10, "ab"))
    continuity.received(text(20, " c"))
    segment = continuity.lost()
    assert segment is not None and segment.text == "ab c" and segment.segment == 0
    assert [(w.word, w.start, w.end, w.confidence) for w in segment.words] == [
        ("ab", 0.4, 0.44, 0.4),
        ("c", 0.8, 0.84, 0.4),
    ]
    assert continuity.resume() == (Reconnected(0.84, 0), round(0.84 * RATE) * 2)
    later = continuity.received(text(5))
    assert isinstance(later, Text)
    assert later.delta == " a" and later.segment == 1
    assert later.characters[0].frame == 26 and later.characters[0].time == pytest.approx(0.84 + 0.225)
    assert continuity.received(End(segments=0, duration=1.0)).duration == pytest.approx(1.84)  # type: ignore[union-attr]


async def test_a_stream_that_has_ended_takes_and_gives_no_more(lively_server: Any, clip: NDArray[np.int16]):
    async def pieces() -> AsyncIterator[bytes]:
        yield clip.tobytes()

    async with asyncio.timeout(60), StreamingClient(lively_server.url) as client:
        assert isinstance([event async for event in client.transcribe(pieces())][-1], End)
        with pytest.raises(ClientError, match="has ended"):
            [event async for event in client.transcribe(pieces())]
        with pytest.raises(ClientError, match="has ended"):
            await client.send(bytes(2))


async def test_who_is_cancelled_while_audio_is_sent_again_leaves_no_gap():
    heard, reads_on, number = asyncio.get_running_loop().create_future(), asyncio.Event(), 0

    async def handle(connection: ServerConnection) -> None:
        nonlocal number
        number, mine = number + 1, number + 1
        await connection.recv()
        await connection.send(READY.model_dump_json())
        if mine == 1:  # lost once much has come
            num_bytes = 0
            while num_bytes < 23_950_000:  # the rest is less than sockets hold
                num_bytes += len(await connection.recv())
            connection.transport.abort()
            return
        if mine == 2:  # takes nothing for as long as the sender waits
            await reads_on.wait()
        found = list[bytes]()
        with suppress(ConnectionClosed):
            async for message in connection:
                if isinstance(message, str):
                    heard.set_result(b"".join(found))
                    return
                found.append(message)

    async with serve(handle, "127.0.0.1", 0, max_size=None, max_queue=2, compression=None) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        async with StreamingClient(f"ws://127.0.0.1:{port}/v1/stream", sample_rate=48_000) as client:
            sent = [n.to_bytes(2, "little") * 24_000 for n in range(502)]
            for piece in sent[:500]:
                await client.send(piece)
            await client._open.wait_closed()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await client.send(sent[500])
            reads_on.set()
            await client.send(sent[501])
            await client.finish()
            assert await asyncio.wait_for(heard, 60) == b"".join(sent)
    assert number == 3
