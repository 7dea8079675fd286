"""The JavaScript client in Node: real sockets to a real server, connections that break, and its npm package."""

import asyncio
import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.proxy import Proxy
from websockets.asyncio.server import ServerConnection, serve

import mocha_client
from mocha_client.client import transcribe_stream
from mocha_server.messages import Character, End, Error, ErrorCode, Ready, Segment, Text, Word
from mocha_server.subtitles import srt, vtt

PACKAGE = Path(mocha_client.__file__).parent / "javascript"
MODULE = PACKAGE / "mocha-asr.js"
PROGRAMS = Path(__file__).parent / "javascript"
TSC = Path(__file__).parents[1] / "e2e" / "node" / "node_modules" / ".bin" / "tsc"
NODE = ["node", "--experimental-websocket", "--no-warnings"]  # the flag is for Node 20 and 21; later ones need none

READY = Ready(session="a", model="m", sample_rate=16_000, frame_ms=40, latency_ms=25, chunk_width=2).model_dump_json()

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")


@pytest.fixture
def speech(clip: NDArray[np.int16], tmp_path: Path) -> tuple[bytes, Path]:
    pcm = np.tile(clip, 2).tobytes()
    (tmp_path / "speech.raw").write_bytes(pcm)
    return pcm, tmp_path / "speech.raw"


class Program:
    """stream.mjs as it runs: events as they are printed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.events: list[dict[str, Any]] = []

    @classmethod
    async def start(cls, url: str, path: Path, **options: Any) -> "Program":
        arguments = [str(PROGRAMS / "stream.mjs"), MODULE.as_uri(), url, str(path), json.dumps(options)]
        pipe = asyncio.subprocess.PIPE
        return cls(await asyncio.create_subprocess_exec(*NODE, *arguments, stdin=pipe, stdout=pipe))

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        assert self.process.stdout is not None
        while line := await asyncio.wait_for(self.process.stdout.readline(), 60):
            self.events.append(json.loads(line))
            yield self.events[-1]

    async def until(self, kind: str) -> None:
        async for event in self:
            if event["type"] == kind:
                return
        raise AssertionError(f"no {kind} in {self.events}")

    async def rest(self) -> list[dict[str, Any]]:
        """Let it go on to its end."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        async for _ in self:
            pass
        assert await self.process.wait() == 0
        return self.events

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == kind]

    @property
    def characters(self) -> list[dict[str, Any]]:
        return [c for event in self.of("text") for c in event["characters"]]


async def test_events_are_those_of_the_python_client(lively_server: Any, speech: tuple[bytes, Path]):
    pcm, path = speech
    program = await Program.start(lively_server.url, path)
    await program.until("text")
    events = await program.rest()
    assert events[0]["type"] == "ready" and events[0]["model"] == "lively"
    expected = await asyncio.to_thread(transcribe_stream, [pcm], lively_server.url)
    segments = [e.model_dump() for e in expected if isinstance(e, Segment)]
    assert program.of("segment") == segments
    assert "".join(e["delta"] for e in program.of("text")) == "".join(e.delta for e in expected if isinstance(e, Text))
    assert program.of("end") == [expected[-1].model_dump()]  # type: ignore[union-attr]
    assert events[-1] == {"type": "warnings", "warnings": []}


async def test_a_key_goes_with_each_connection(keyed_server: Any, speech: tuple[bytes, Path]):
    for key in ("wrong", keyed_server.key):
        async with Proxy(keyed_server.port) as proxy:
            program = await Program.start(proxy.url, speech[1], apiKey=key)
            if key == "wrong":
                await program.rest()
                assert program.of("failed")[0]["message"].startswith("no mocha-asr server answers")
            else:
                await program.until("text")
                proxy.cut()
                await program.rest()
                assert program.of("reconnected") and program.of("end")
    unsendable = """
        const [module, address] = process.argv.slice(1);
        const { StreamingClient } = await import(module);
        for (const apiKey of ["two words", "é", ","])
          try { new StreamingClient(address, { apiKey }); } catch (error) { console.log(error instanceof TypeError); }
    """
    assert await run(unsendable, keyed_server.url) == ["true", "true", "true"]


async def test_a_broken_connection_is_replaced(lively_server: Any, speech: tuple[bytes, Path]):
    pcm, path = speech
    async with Proxy(lively_server.port) as proxy:
        program = await Program.start(proxy.url, path)
        await program.until("text")
        proxy.cut()
        events = await program.rest()
    (again,) = program.of("reconnected")
    before = [c for e in events[: events.index(again)] if e["type"] == "text" for c in e["characters"]]
    assert again["missing"] == 0 and again["time"] == pytest.approx((before[-1]["frame"] + 1) * 0.04)
    later = pcm[round(again["time"] * 16_000) * 2 :]
    expected = [e for e in await asyncio.to_thread(transcribe_stream, [later], lively_server.url)]
    shift = round(again["time"] / 0.04)
    assert [(c["text"], c["frame"] - shift) for c in program.characters[len(before) :]] == [
        (c.text, c.frame) for e in expected if isinstance(e, Text) for c in e.characters
    ]
    segments = program.of("segment")
    assert "".join(e["delta"] for e in program.of("text")).strip() == " ".join(s["text"] for s in segments)
    assert [s["segment"] for s in segments] == list(range(len(segments)))
    assert all(" ".join(w["word"] for w in s["words"]) == s["text"] for s in segments)
    (end,) = program.of("end")
    assert end["segments"] == len(segments) and end["duration"] == pytest.approx(len(pcm) / 32_000, abs=1e-3)


async def test_a_lost_server_is_given_up(lively_server: Any, speech: tuple[bytes, Path]):
    async with Proxy(lively_server.port) as proxy:
        program = await Program.start(proxy.url, speech[1], reconnectSeconds=0.5)
        await program.until("text")
        proxy.target = 9
        proxy.cut()
        await program.rest()
    (failed,) = program.of("failed")
    assert failed["code"] is None and "lost" in failed["message"]


async def test_each_loss_has_its_own_time(lively_server: Any, speech: tuple[bytes, Path]):
    async with Proxy(lively_server.port) as proxy:
        program = await Program.start(proxy.url, speech[1], reconnectSeconds=1)
        await program.until("text")
        for _ in range(2):
            proxy.cut()
            await program.until("reconnected")
            await asyncio.sleep(1.1)
        await program.rest()
    assert not program.of("failed") and program.of("end")


async def test_errors_are_typed(lively_server: Any, make_server: Any, lively: Any, speech: tuple[bytes, Path]):
    async def failure(url: str, **options: Any) -> Any:
        program = await Program.start(url, speech[1], **options)
        await program.rest()
        return program.of("failed")[0]

    assert (await failure("ws://127.0.0.1:9/v1/stream"))["message"].startswith("no mocha-asr server answers")
    assert (await failure(lively_server.url, sampleRate=1))["code"] == ErrorCode.START_EXPECTED
    assert (await failure(lively_server.url, encoding="pcm_f32le"))["code"] == ErrorCode.INVALID_AUDIO
    idle = await failure(make_server(lively, idle_s=0.3).url, channels=8, reconnectSeconds=0.2)
    assert idle["code"] == ErrorCode.IDLE

    for messages in (["hello"], ['{"type":"hello"}'], [READY, '{"type":"hello"}'], [READY, "5"]):
        async with serve(partial(say, messages), "127.0.0.1", 0) as other:
            port = next(iter(other.sockets)).getsockname()[1]
            assert "does not know" in (await failure(f"ws://127.0.0.1:{port}/"))["message"]


async def test_what_is_open_when_the_stream_fails_is_a_segment():
    letter = Character(text="a", frame=5, time=0.2, p=0.8, q=0.5, chunk=[1.0])
    failed = Error(code=ErrorCode.INVALID_AUDIO, message="not finite")
    messages = [READY, *(m.model_dump_json() for m in (Text(segment=0, delta="a", characters=[letter]), failed))]
    program = """
        const [module, address] = process.argv.slice(1);
        const { StreamingClient } = await import(module);
        const client = new StreamingClient(address);
        await client.open();
        try {
          for await (const { type } of client) console.log(type);
        } catch ({ message }) {
          console.log(message);
        }
        client.close();
    """
    async with serve(partial(say, messages), "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        assert await run(program, f"ws://127.0.0.1:{port}/") == ["text", "segment", "not finite"]


async def test_a_connection_that_takes_nothing_any_more_is_replaced(lively_server: Any, tmp_path: Path):
    silence = tmp_path / "silence.raw"
    silence.write_bytes(bytes(1 << 25))  # more than sockets hold on their way
    source = MODULE.read_text()
    assert "STALLED_MS = 60_000" in source
    (tmp_path / "soon.mjs").write_text(source.replace("STALLED_MS = 60_000", "STALLED_MS = 2_000"))
    async with Proxy(lively_server.port, stall_after=100_000) as proxy:
        done = await run(STALL, proxy.url, str(silence), module=tmp_path / "soon.mjs")
        assert proxy.num_connections > 1
    assert done == ["0"]


STALL = """
const [module, address, path] = process.argv.slice(1);
const { StreamingClient } = await import(module);
const client = new StreamingClient(address, { encoding: "pcm_f32le", keepSeconds: 1 });
await client.open();
const audio = (await import("node:fs")).readFileSync(path); // 32 MiB, more than is kept
client.send(audio).catch(() => {}); // it is closed before all is sent
for await (const { type, missing } of client) {
  if (type !== "reconnected") continue;
  console.log(missing);
  break;
}
process.exit(); // at once, though audio waits in the new connection
"""


async def test_a_server_that_says_nothing_after_the_finish_is_left(tmp_path: Path):
    (tmp_path / "soon.mjs").write_text(MODULE.read_text().replace("STALLED_MS = 60_000", "STALLED_MS = 200"))
    program = """
        const [module, address] = process.argv.slice(1);
        const { StreamingClient } = await import(module);
        const client = new StreamingClient(address);
        await client.open();
        await client.finish();
        for await (const { type } of client) console.log(type);
    """
    num_streams = 0

    async def silent_once(socket: ServerConnection) -> None:
        nonlocal num_streams
        num_streams += 1
        await socket.send(READY)
        if num_streams > 1:
            await socket.send(End(segments=0, duration=0).model_dump_json())
        await socket.wait_closed()

    async with serve(silent_once, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        assert await run(program, f"ws://127.0.0.1:{port}/", module=tmp_path / "soon.mjs") == ["reconnected", "end"]


async def test_a_client_may_be_closed_before_it_is_open(lively_server: Any):
    program = """
        const [module, address] = process.argv.slice(1);
        const { StreamingClient, StreamError } = await import(module);
        const client = new StreamingClient(address);
        const opening = client.open().catch((error) => error);
        client.close();
        const error = await opening;
        console.log(error instanceof StreamError, error.message);
        const wrong = await new StreamingClient("nonsense").open().catch((error) => error);
        console.log(wrong instanceof StreamError);
        await new StreamingClient(address).send(new Uint8Array(0));
    """
    assert await run(program, lively_server.url) == ["true the client was closed", "true"]


async def test_what_makes_no_sense_is_refused(lively_server: Any):
    program = """
        const [module, address] = process.argv.slice(1);
        const { StreamingClient } = await import(module);
        const client = new StreamingClient(address);
        const told = ({ name, message }) => console.log(name, message);
        await client[Symbol.asyncIterator]().next().catch(told);
        await client.open();
        await client.open().catch(told);
        let refused = 0;
        for (const audio of ["ab", undefined, null, {}, 5, [1]]) await client.send(audio).catch(() => refused++);
        for (const audio of [new ArrayBuffer(2), new Int16Array(1), Buffer.alloc(2)]) await client.send(audio);
        client.close();
        await client.open().catch(told);
        console.log(refused);
    """
    assert await run(program, lively_server.url) == [
        "StreamError the client is not open",
        "StreamError the client is open already",
        "StreamError the client was closed",
        "6",
    ]


async def test_calls_that_overlap_are_sent_in_their_order():
    taken: list[bytes | str] = []

    async def take(socket: ServerConnection) -> None:
        await socket.recv()
        await socket.send(READY)
        async for message in socket:
            taken.append(message)
            if isinstance(message, str):
                await socket.send(End(segments=0, duration=0).model_dump_json())

    program = """
        const [module, address] = process.argv.slice(1);
        const { StreamingClient } = await import(module);
        const client = new StreamingClient(address);
        await client.open();
        const audio = [1, 2].map((n) => new Uint8Array(3 << 16).fill(n));
        await Promise.all([...audio.map((bytes) => client.send(bytes)), client.finish()]);
        for await (const { type } of client) console.log(type);
        const said = ({ name, message }) => console.log(name, message);
        await client.send(audio[0]).catch(said);
        await client.finish().catch(said);
        for await (const { type } of client) console.log(type);
        client.close();
    """
    async with serve(take, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        printed = await run(program, f"ws://127.0.0.1:{port}/")
    assert printed == ["end", *["StreamError the stream has ended"] * 2]
    *audio, finish = taken
    assert b"".join(m for m in audio if isinstance(m, bytes)) == b"\1" * (3 << 16) + b"\2" * (3 << 16)
    assert finish == '{"type":"finish"}'


async def test_a_sleep_of_the_machine_does_not_end_the_stream(lively_server: Any):
    program = """
        const [module, address] = process.argv.slice(1);
        const { StreamingClient } = await import(module);
        const now = Date.now;
        let away = false, socket;
        class Lossy extends WebSocket {
          constructor(url) { super(away ? "ws://127.0.0.1:9" : url); socket = this; }
        }
        const client = new StreamingClient(address, { WebSocket: Lossy });
        await client.open();
        away = true;
        socket.close();
        await new Promise((resolve) => setTimeout(resolve, 50));
        Date.now = () => now() + 3_600_000;
        setTimeout(() => { away = false; }, 500);
        for await (const { type } of client) {
          console.log(type);
          if (type === "reconnected") break;
        }
        client.close();
    """
    assert await run(program, lively_server.url) == ["reconnected"]


async def test_a_stream_that_was_idle_goes_on_with_who_sends_again(make_server: Any, lively: Any):
    program = """
        const [module, address] = process.argv.slice(1);
        const { StreamingClient } = await import(module);
        async function idles(then) {
          const client = new StreamingClient(address);
          await client.open();
          while (!client.reconnecting) await new Promise((resolve) => setTimeout(resolve, 20));
          setTimeout(() => Promise.resolve(client[then](new Uint8Array(2))).catch(() => {}), 200);
          const { value } = await client[Symbol.asyncIterator]().next().catch(({ message }) => ({ value: message }));
          client.close();
          return value.type ?? value;
        }
        console.log((await Promise.all(["send", "finish", "close"].map(idles))).join());
    """
    url = make_server(lively, idle_s=0.3).url
    assert await run(program, url) == ["reconnected,reconnected,the client was closed"]


async def run(program: str, *arguments: str, module: Path = MODULE) -> list[str]:
    """The lines that a program prints until it ends by itself."""
    command = [*NODE, "--input-type=module", "-e", program, module.as_uri(), *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    printed, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    return printed.decode().splitlines()


async def say(messages: list[str], socket: ServerConnection) -> None:
    for message in messages:
        await socket.send(message)
    await socket.wait_closed()


def test_captions_are_the_servers():
    random = np.random.default_rng(0)
    segments, at = [], 0.0
    for number in range(40):
        words = []
        for _ in range(int(random.integers(1, 30))):
            start = round(at + float(random.exponential(0.3)), 3)
            at = round(start + float(random.uniform(0.04, 90 if number == 7 else 1)), 3)
            words.append(Word(word="it's", start=start, end=at, confidence=0.5))
        at += 1000
        text = " ".join(w.word for w in words)
        segments.append(Segment(segment=number, text=text, start=words[0].start, end=words[-1].end, words=words))
    for some in ([], segments):
        given = json.dumps([s.model_dump() for s in some])
        command = ["node", str(PROGRAMS / "captions.mjs"), MODULE.as_uri()]
        done = subprocess.run(command, input=given, capture_output=True, text=True, check=True)
        assert json.loads(done.stdout) == {"srt": srt(some), "vtt": vtt(some)}


@pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm")
def test_the_package_has_what_it_needs_and_nothing_else():
    done = subprocess.run(["npm", "pack", "--dry-run", "--json"], cwd=PACKAGE, capture_output=True, check=True)
    (packed,) = json.loads(done.stdout)
    names = {file["path"] for file in packed["files"]}
    assert names == {"package.json", "LICENSE", "README.md", "mocha-asr.js", "mocha-asr.d.ts"}
    described = json.loads((PACKAGE / "package.json").read_text())
    assert described["name"] == "mocha-asr" and "dependencies" not in described
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert described["version"].replace("-dev.", ".dev") == project["version"]
    exported = set(re.findall(r"^export (?:class|function) (\w+)", MODULE.read_text(), re.MULTILINE))
    typed = set(re.findall(r"^export (?:class|function) (\w+)", (PACKAGE / "mocha-asr.d.ts").read_text(), re.MULTILINE))
    assert exported == typed == {"StreamError", "StreamingClient", "toSrt", "toVtt"}
    codes = re.search(r"ErrorCode =\n(.*?);", (PACKAGE / "mocha-asr.d.ts").read_text(), re.DOTALL)
    assert codes and set(re.findall(r'"(\w+)"', codes[1])) == set(ErrorCode)


@pytest.mark.skipif(not TSC.exists(), reason="needs `npm install` in tests/e2e/node")
def test_types(tmp_path: Path):
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules" / "mocha-asr").symlink_to(PACKAGE)
    shutil.copy(PROGRAMS / "types.ts", tmp_path)
    options = ["--strict", "--noEmit", "--target", "es2022", "--module", "nodenext", "--lib", "es2022,dom"]
    done = subprocess.run([str(TSC), *options, "types.ts"], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout.decode()
