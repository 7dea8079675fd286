"""A TCP proxy on a free port whose connections a test can break, and whose target it can change."""

import asyncio
from types import TracebackType


class Proxy:
    def __init__(self, port: int, stall_after: int | None = None) -> None:
        """The first connection takes nothing from its client after so many bytes, and stays open."""
        self.target, self._stall_after = port, stall_after
        self.port = 0
        self.num_connections = 0
        self._cut = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/v1/stream"

    async def __aenter__(self) -> "Proxy":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Break every connection, whatever is on its way."""
        self._cut.set()
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(asyncio.current_task())  # type: ignore[arg-type]
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        self.num_connections += 1
        self._writers |= {writer, up_writer}
        bytes_up, self._stall_after = self._stall_after, None
        await asyncio.gather(self._pipe(reader, up_writer, bytes_up), self._pipe(up_reader, writer))
        self._writers -= {writer, up_writer}

    async def _pipe(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stall_after: int | None = None
    ) -> None:
        passed = 0
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
                passed += len(data)
                if stall_after is not None and passed > stall_after:
                    await self._cut.wait()
        except OSError:
            pass
        finally:
            writer.close()
