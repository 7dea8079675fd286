"""Runs N streams from several processes against a server, and gathers what they measured."""

import asyncio
import gc
import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from mocha_client.bench.measurements import Measured, Run, ServerUse
from mocha_client.bench.processes import cpu_seconds, rss_bytes, servers
from mocha_client.bench.stream import Clip, LoadStream
from mocha_client.sources import SourceError

CONNECT_AT_ONCE = 32  # handshakes under way in one process
CONNECT_TIMEOUT_S = 60.0
END_TIMEOUT_S = 60.0  # after its finish message a stream has this long to end


@dataclass(frozen=True)
class Job:
    """What one process does: streams `indices` of `total`, stream i saying clip ``i % len(clips)``."""

    url: str
    api_key: str | None
    clips: list[Clip]
    indices: range
    total: int
    spread_s: float


def run_load(
    url: str, api_key: str | None, port: int, clips: list[Clip], streams: int, processes: int, spread_s: float
) -> Run:
    """All streams at once: connected first, then begun one after the other within `spread_s`.

    `port` names the server's processes where they run on this machine. Raises SourceError if a process of ours dies.
    """
    server = servers(port)
    before = rss_bytes(server)
    context = multiprocessing.get_context("spawn")
    workers: list[tuple[SpawnProcess, Connection]] = []
    for number in range(min(processes, streams)):
        ours, theirs = context.Pipe()
        job = Job(url, api_key, clips, range(number, streams, processes), streams, spread_s)
        process = context.Process(target=_work, args=(job, theirs), daemon=True)
        process.start()
        theirs.close()
        workers.append((process, ours))
    try:
        for _, pipe in workers:
            pipe.recv()  # all connected
        began_at = time.monotonic() + 0.2
        for _, pipe in workers:
            pipe.send(began_at)
        use = _observe(server, before, began_at + spread_s, began_at + clips[0].audio_s)
        measured: list[Measured] = [m for _, pipe in workers for m in pipe.recv()]
    except EOFError as error:
        raise SourceError("a process of the load generator died") from error
    finally:
        for process, _ in workers:
            process.join(10)
            process.kill()
    return Run(sorted(measured, key=lambda m: m.index), began_at, use)


def _observe(server: list[int], before: int, start: float, end: float) -> ServerUse | None:
    """CPU and memory of the server while all streams run, from `start` to `end`."""
    if not server:
        return None
    try:
        time.sleep(max(0.0, start - time.monotonic()))
        began, used = time.monotonic(), cpu_seconds(server)
        time.sleep(max(0.5, end - 0.5 - began))
        cores = (cpu_seconds(server) - used) / (time.monotonic() - began)
        return ServerUse(cores, before, rss_bytes(server))
    except OSError:  # the server went away; its streams will tell
        return None


def _work(job: Job, pipe: Connection) -> None:
    gc.disable()  # a collection would delay every stream of the process; a run is short
    pipe.send(asyncio.run(_streams(job, pipe)))


async def _streams(job: Job, pipe: Connection) -> list[Measured]:
    streams = [LoadStream(i, job.url, job.api_key, job.clips[i % len(job.clips)]) for i in job.indices]
    gate = asyncio.Semaphore(CONNECT_AT_ONCE)

    async def connect(stream: LoadStream) -> bool:
        async with gate:
            return await stream.connect(CONNECT_TIMEOUT_S)

    admitted = await asyncio.gather(*map(connect, streams))
    pipe.send(None)
    began_at: float = await asyncio.to_thread(pipe.recv)
    for stream, index, ok in zip(streams, job.indices, admitted, strict=True):
        if ok:
            stream.begin(began_at + job.spread_s * index / job.total)
    longest = max(clip.audio_s for clip in job.clips) + job.spread_s
    await asyncio.wait([s.done for s in streams], timeout=began_at - time.monotonic() + longest + END_TIMEOUT_S)
    for stream in streams:
        stream.close()
    return [s.measured for s in streams]
