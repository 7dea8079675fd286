"""Utterances over one engine row: flush, begin anew, keep the place; without sockets."""

import asyncio
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mocha_model.emissions import text_of
from mocha_model.recognizer import Recognizer
from mocha_server.engine import Engine, Limits
from mocha_server.incoming import cut
from mocha_server.live_engines import LiveEngines
from mocha_server.messages import Encoding, End, Error, ErrorCode, Segment, Start, Text
from mocha_server.metrics import Metrics
from mocha_server.protocols.live import Gone, Live, Refused, Request, Said, Then, converse
from mocha_server.stream import EngineError


@pytest.fixture
def engine(lively: Recognizer) -> Any:
    running = Engine(lively, Limits(capacity=1, max_buffer_s=1.0))
    running.start()
    yield running
    running.stop()


@pytest.mark.parametrize("size", [0, 1, 1 << 15, (1 << 15) + 1, 200_000])
def test_messages_are_cut_into_pieces_of_bounded_size(size: int):
    audio = bytes(range(256)) * (size // 256 + 1)
    pieces = list(cut(audio[:size]))
    assert b"".join(pieces) == audio[:size] and len(pieces) == max(1, -(-size // (1 << 15)))
    assert max(map(len, pieces)) <= 1 << 15


def segments_text(messages: list[Any]) -> str:
    return " ".join(m.text for m in messages if isinstance(m, Segment))


async def utterance(live: Live) -> list[Said]:
    return [message async for message in live.utterance()]


async def test_each_utterance_is_heard_as_if_alone(engine: Engine, lively: Recognizer, clip: NDArray[np.int16]):
    expected = text_of(lively.transcribe(torch.from_numpy(clip.astype(np.float32) / 32768)))
    live = Live(LiveEngines(engine))
    said = []
    for _ in range(3):
        feeding = asyncio.create_task(live.hear(clip.tobytes(), Start))
        await feeding
        await live.end(Start)
        said.append(await utterance(live))
        assert engine.num_streams == 1  # the place is kept
    assert [segments_text(messages) for messages in said] == [expected] * 3
    for k, messages in enumerate(said):
        end = messages[-1]
        assert isinstance(end, End) and end.duration == pytest.approx(len(clip) / 16_000, abs=1e-3)
        first = next(m for m in messages if isinstance(m, Segment)).words[0].start
        at = next(m for m in said[0] if isinstance(m, Segment)).words[0].start
        assert first == pytest.approx(at + k * len(clip) / 16_000, abs=2e-3)
    assert live.heard_s == pytest.approx(3 * len(clip) / 16_000, abs=1e-2)
    live.close()
    assert engine.num_streams == 0


async def test_settled_gives_what_was_heard_so_far(engine: Engine, clip: NDArray[np.int16]):
    live = Live(LiveEngines(engine))
    await live.hear(clip.tobytes(), Start)
    early = [m for m in await live.settled() if isinstance(m, Text)]
    await live.end(Start)
    late = [m for m in await utterance(live) if isinstance(m, Text)]
    frames = [c.frame for m in early + late for c in m.characters]
    assert early and frames == sorted(frames)
    heard = len(clip) // 1280 * 1280  # whole blocks
    assert max(c.time for m in early for c in m.characters) > heard / 16_000 - 1
    live.close()


async def test_a_stopped_engine_ends_a_settling_client(lively: Recognizer, clip: NDArray[np.int16]):
    engine = Engine(lively, Limits(capacity=1, max_buffer_s=1.0))
    engine.start()
    live = Live(LiveEngines(engine))
    await live.hear(clip.tobytes(), Start)
    engine.stop()  # some of it is still to be heard
    await asyncio.sleep(0.05)
    with pytest.raises(EngineError):
        await asyncio.wait_for(live.settled(), 20)
    assert engine.num_streams == 0


async def test_bad_samples_and_odd_bytes(engine: Engine):
    live = Live(LiveEngines(engine))
    with pytest.raises(Refused) as refused:
        await live.hear(np.array([np.nan], "<f4").tobytes(), partial(Start, encoding=Encoding.PCM_F32LE))
    assert refused.value.error.code is ErrorCode.INVALID_AUDIO
    live.close()
    live = Live(LiveEngines(engine))
    await live.hear(b"\0\0\0", Start)
    await live.end(Start)
    warning, end = (await utterance(live))[-2:]
    assert isinstance(warning, Error) and not warning.fatal and isinstance(end, End)
    live.close()


class Script:
    """A transport that plays messages and notes what is sent."""

    def __init__(self, *messages: str, hang: bool = False) -> None:
        self._messages, self._hang = list(messages), hang
        self.sent: list[str] = []
        self.closed: list[Error | None] = []

    async def receive(self) -> str:
        if not self._messages:
            if self._hang:
                await asyncio.sleep(60)
            raise Gone
        return self._messages.pop(0)

    async def send(self, message: str) -> None:
        self.sent.append(message)

    async def close(self, error: Error | None) -> None:
        self.closed.append(error)


class Echo:
    """A translator whose messages are the names of what it shall do."""

    start = staticmethod(Start)

    def received(self, message: str) -> Request[str]:
        if message == "bug":
            raise ZeroDivisionError
        return Request((f"got {message}",), then=Then.FINISH if message == "finish" else Then.LISTEN)

    def said(self, message: Said) -> tuple[str, ...]:
        return (message.type,)

    def failed(self, error: Error) -> tuple[str, ...]:
        return (f"failed {error.code.value}",)


async def test_a_conversation_in_order(engine: Engine):
    script = Script("a", "finish")
    await converse(script, Echo(), Live(LiveEngines(engine)), 5, greeting=("hello",))
    assert script.sent[:3] == ["hello", "got a", "got finish"] and script.sent[-1] == "end"
    assert script.closed == [None] and engine.num_streams == 0


@pytest.mark.parametrize(
    ("script", "code"), [(Script("bug"), "internal"), (Script(hang=True), "idle")], ids=["bug", "idle"]
)
async def test_what_goes_wrong_is_told_and_frees_the_row(engine: Engine, script: Script, code: str):
    await converse(script, Echo(), Live(LiveEngines(engine)), 0.1)
    assert script.sent == [f"failed {code}"] and script.closed[0] is not None
    assert engine.num_streams == 0


async def test_a_full_server_and_a_client_that_leaves(engine: Engine):
    first = Live(LiveEngines(engine))
    first.open()
    script = Script(hang=True)
    await converse(script, Echo(), Live(LiveEngines(engine)), 5, greeting=("hello",))
    assert script.sent == ["hello", "failed server_full"]
    lazy = Script("a")
    await converse(lazy, Echo(), Live(LiveEngines(engine), lazy=True), 5)
    assert lazy.sent == ["got a"] and lazy.closed == []  # gone: nothing is sent
    first.close()


async def test_cancelling_a_conversation_frees_the_row(engine: Engine):
    task = asyncio.create_task(converse(Script(hang=True), Echo(), Live(LiveEngines(engine)), 60))
    await asyncio.sleep(0.05)
    assert engine.num_streams == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert engine.num_streams == 0


async def test_an_utterance_moves_to_the_engine_it_wants(engine: Engine, lively: Recognizer, clip: NDArray[np.int16]):
    other = Engine(lively, Limits(capacity=1))
    other.start()
    live, heard = Live(LiveEngines(engine, other)), []
    reading = asyncio.create_task(anext(live.messages()))
    live.open()
    assert (engine.num_streams, other.num_streams) == (1, 0)
    for patient, places in ((True, (0, 1)), (True, (0, 1)), (None, (1, 0))):
        start = partial(Start, patient=patient)
        await live.hear(clip.tobytes(), start)
        assert (engine.num_streams, other.num_streams) == places
        if not heard:  # whoever waited for the first engine hears the second
            heard.append(await reading)
        await live.end(start)
        heard += await utterance(live)
    assert sum(isinstance(message, End) for message in heard) == 3
    live.close()
    other.stop()


async def test_who_has_the_last_place_may_move_with_it(lively: Recognizer):
    metrics = Metrics()
    engines = [Engine(lively, Limits(capacity=1), metrics) for _ in range(2)]
    live = Live(LiveEngines(*engines))
    live.open()
    await live.hear(bytes(3_200), partial(Start, patient=True))
    assert [engine.num_streams for engine in engines] == [0, 1]
    live.close()


async def test_a_full_engine_refuses_who_would_move_to_it(engine: Engine, lively: Recognizer):
    other = Engine(lively, Limits(capacity=1))
    taken = other.open(live=True)
    live = Live(LiveEngines(engine, other))
    live.open()
    with pytest.raises(EngineError) as refused:
        await live.hear(bytes(3_200), partial(Start, patient=True))
    assert refused.value.code is ErrorCode.SERVER_FULL and engine.num_streams == 0
    live.close()
    taken.close()
    assert (engine.num_streams, other.num_streams) == (0, 0)
