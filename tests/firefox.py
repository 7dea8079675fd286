"""A headless Firefox driven over WebDriver BiDi, which it speaks by itself: no driver and no package are needed."""

import asyncio
import itertools
import json
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

BINARY = shutil.which("firefox-esr") or shutil.which("firefox")
PULSEAUDIO = shutil.which("pulseaudio") and shutil.which("pacat")  # which comes with it
SLOW_S = 120  # a guard against hanging, no measure
PREFERENCES = {
    "media.navigator.permission.disabled": True,
    "datareporting.policy.dataSubmissionEnabled": False,
    "app.normandy.enabled": False,
    "network.captive-portal-service.enabled": False,
    "network.connectivity-service.enabled": False,
}


async def until(condition: Callable[[], Any]) -> Any:
    """What `condition` gives once it holds."""
    for _ in range(10 * SLOW_S):
        if found := condition():
            return found
        await asyncio.sleep(0.1)
    raise TimeoutError


@asynccontextmanager
async def sound(folder: Path, pcm: bytes, rate: int = 44_100) -> AsyncIterator[dict[str, str]]:
    """An environment with a loudspeaker that nobody hears and a microphone that hears `pcm` (16 kHz) again and again.

    Without a loudspeaker, Firefox runs no audio at all. The page's audio runs at its `rate`.
    """
    address, heard = folder / "sound", folder / "heard.raw"
    heard.write_bytes(pcm)
    modules = [
        f"module-null-sink sink_name=loudspeaker rate={rate}",
        "module-null-sink sink_name=air",
        "module-remap-source master=air.monitor source_name=microphone",
        f"module-native-protocol-unix socket={address} auth-anonymous=1",
    ]
    options = ["-n", "--daemonize=no", "--use-pid-file=no", "--exit-idle-time=-1", *(f"--load={m}" for m in modules)]
    home = {**os.environ, "HOME": str(folder), "XDG_RUNTIME_DIR": str(folder)}
    server = {"PULSE_SERVER": f"unix:{address}"}
    play = f"while cat '{heard}'; do :; done | pacat --device=air --rate=16000 --channels=1 --format=s16le"
    async with _process(["pulseaudio", *options], home, folder / "sound.log"):
        await until(address.exists)
        async with _process(["sh", "-c", play], {**home, **server}, folder / "pacat.log"):
            yield {**os.environ, **server, "PULSE_SINK": "loudspeaker", "PULSE_SOURCE": "microphone"}


@asynccontextmanager
async def started(folder: Path, environment: dict[str, str]) -> AsyncIterator["Firefox"]:
    """A browser with a profile of its own and one empty page."""
    lines = [f"user_pref({json.dumps(name)}, {json.dumps(value)});\n" for name, value in PREFERENCES.items()]
    (folder / "user.js").write_text("".join(lines))
    options = ["--headless", "--no-remote", "--remote-debugging-port=0", "--profile", str(folder)]
    log = folder / "firefox.log"
    async with _process([str(BINARY), *options], environment, log):
        found = await until(lambda: re.search(r"WebDriver BiDi listening on (ws://\S+)", log.read_text()))
        async with connect(f"{found[1]}/session", max_size=None, ping_interval=None) as socket:
            browser = Firefox(socket)
            reading = asyncio.create_task(browser.read())
            await browser.begin()
            yield browser
            reading.cancel()


@asynccontextmanager
async def _process(command: list[str], environment: dict[str, str], log: Path) -> AsyncIterator[None]:
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *command, env=environment, stdout=out, stderr=out, start_new_session=True
        )
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # nothing in its profile is worth keeping
        await process.wait()


class Firefox:
    """One page; `problems` are its errors and warnings, `asked` the addresses it asked."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._context = ""
        self.problems: list[str] = []
        self.asked: set[str] = set()

    async def begin(self) -> None:
        await self._call("session.new", capabilities={})
        (context,) = (await self._call("browsingContext.getTree"))["contexts"]
        self._context = context["context"]
        await self._call("session.subscribe", events=["log.entryAdded", "network.beforeRequestSent"])

    async def read(self) -> None:
        """Take answers and events, until cancelled."""
        async for data in self._socket:
            message = json.loads(data)
            parameters = message.get("params", {})
            if message.get("id") is not None:
                self._answers.pop(message["id"]).set_result(message)
            elif message.get("method") == "log.entryAdded" and parameters["level"] in ("warn", "error"):
                self.problems.append(parameters["text"])
            elif message.get("method") == "network.beforeRequestSent":
                self.asked.add(parameters["request"]["url"])

    async def _call(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        message = await asyncio.wait_for(answer, SLOW_S)
        assert message["type"] == "success", message
        return message["result"]

    async def go(self, url: str) -> None:
        await self._call("browsingContext.navigate", context=self._context, url=url, wait="complete")

    async def evaluate(self, expression: str) -> Any:
        """A string, a number, a reference to an element, or the promise of one."""
        target = {"context": self._context}
        answer = await self._call("script.evaluate", expression=expression, target=target, awaitPromise=True)
        assert answer["type"] == "success", answer
        return answer["result"] if "sharedId" in answer["result"] else answer["result"].get("value")

    async def _element(self, name: str) -> dict[str, Any]:
        return {"sharedId": (await self.evaluate(f"document.getElementById({json.dumps(name)})"))["sharedId"]}

    async def click(self, name: str) -> None:
        """With the mouse, as a user does: else a page may start no audio."""
        origin = {"type": "element", "element": await self._element(name)}
        actions: list[dict[str, Any]] = [{"type": "pointerMove", "x": 0, "y": 0, "origin": origin}]
        actions += [{"type": kind, "button": 0} for kind in ("pointerDown", "pointerUp")]
        mouse = {"type": "pointer", "id": "mouse", "actions": actions}
        await self._call("input.performActions", context=self._context, actions=[mouse])

    async def choose(self, name: str, path: Path) -> None:
        """A file for an input of files."""
        element = await self._element(name)
        await self._call("input.setFiles", context=self._context, element=element, files=[str(path)])

    async def text(self, name: str) -> str:
        return " ".join(str(await self.evaluate(f"document.getElementById({json.dumps(name)}).textContent")).split())

    async def until(self, name: str, pattern: str) -> None:
        """Wait for an element's text."""
        said = ""
        for _ in range(10 * SLOW_S):
            if re.search(pattern, said := await self.text(name)):
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"#{name} says {said!r}, not {pattern}; {self.problems}")
