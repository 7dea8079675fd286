"""The command `bench`: makes clips, learns what each gives alone, runs the load, reports. Searches if asked to."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mocha_client.bench import speech
from mocha_client.bench.generator import run_load
from mocha_client.bench.measurements import PERCENTILES, Measured, Run, ServerUse, keeps_up
from mocha_client.bench.stream import alone, make_clip
from mocha_client.client import DEFAULT_URL, ClientError, endpoint
from mocha_client.sources import SourceError

console = Console(stderr=True)
START_TIMEOUT_S = 60.0
TRIES = 2


def bench(
    context: typer.Context,
    streams: Annotated[int, typer.Option(min=1, help="streams at once; where --search begins")] = 50,
    seconds: Annotated[float, typer.Option(min=1, help="audio of each stream")] = 30.0,
    url: Annotated[str, typer.Option(help="the server's native endpoint, or the address of its page")] = DEFAULT_URL,
    api_key: Annotated[str | None, typer.Option(envvar="MOCHA_API_KEY", help="of a server that wants one")] = None,
    manifest: Annotated[Path | None, typer.Option(help="recorded speech; synthesized if not given")] = None,
    clips: Annotated[int, typer.Option(min=1, help="different clips among the streams")] = 16,
    chunk_ms: Annotated[int, typer.Option(min=10, max=1000, help="audio in each message")] = 100,
    processes: Annotated[int, typer.Option(min=1, help="processes that send")] = max(1, (os.cpu_count() or 2) // 2),
    search: Annotated[bool, typer.Option(help="find the most streams that keep within --limit-ms")] = False,
    limit_ms: Annotated[float, typer.Option(help="p99 of the emission lag that --search allows")] = 300.0,
    most: Annotated[int, typer.Option(min=1, help="where --search stops")] = 20_000,
    serve: Annotated[bool, typer.Option(help="start a server for the run; MOCHA_ variables set it up")] = False,
    engine: Annotated[bool, typer.Option(help="no server and no sockets: the engine alone, in this process")] = False,
    device: Annotated[str, typer.Option(help="of --engine: cpu or cuda")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object, nothing else")] = False,
) -> None:
    """Load a server with paced streams of speech; report lag, errors, wrong transcripts, CPU and memory."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    _refuse_useless({name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"})
    try:
        with console.status("making clips"):
            audio = speech.recorded(manifest, clips, seconds) if manifest else speech.synthesized(clips, seconds)
        with _server() if serve else nullcontext(endpoint(url)) as target:
            spread_s = min(10.0, seconds / 4)
            if engine:
                load = _engine_load(audio, chunk_ms, device, spread_s)
            else:
                load = _socket_load(target, api_key, audio, chunk_ms, processes, spread_s)
            report = _search(load, streams, most, limit_ms) if search else load(streams).report()
    except (SourceError, ClientError, ConnectionError) as error:
        console.print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(1) from error
    if as_json:
        print(json.dumps(report))
    else:
        _show(report)
    if report["errors"] or report["dropped"] or report["mismatches"]:
        raise typer.Exit(1)


def _refuse_useless(given: set[str]) -> None:
    """An option that would change nothing is told, not passed over; `given` are the names of those that there are."""
    loaded = sorted(given & {"url", "serve", "engine"})
    useless = loaded[1:] or sorted(given & ({"api_key", "processes"} if "engine" in given else {"device"}))
    if "serve" in given:  # the server has the key of the environment, which is what we read too
        useless += sorted(given & {"api_key"})
    if "search" not in given:
        useless += sorted(given & {"limit_ms", "most"})
    if useless:
        beside = f"beside --{loaded[0]}" if loaded else "without --engine"
        why = beside if set(useless) - {"limit_ms", "most"} else "without --search"
        names = ", ".join(f"--{name.replace('_', '-')}" for name in useless)
        console.print(f"[red]error:[/red] {names}: without effect {why}", soft_wrap=True)
        raise typer.Exit(2)


def _socket_load(
    url: str, api_key: str | None, audio: list[bytes], chunk_ms: int, processes: int, spread_s: float
) -> Callable[[int], Run]:
    """A function that runs N streams against the server at `url`."""
    plain = [make_clip(a, chunk_ms) for a in audio]
    known = []
    for number, clip in enumerate(plain):
        with console.status(f"clip {number + 1} of {len(plain)} alone"):
            known.append(asyncio.run(alone(url, api_key, clip, timeout_s=60 + 10 * clip.audio_s)))
    ready = [make_clip(a, chunk_ms, expected) for a, expected in zip(audio, known, strict=True)]
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "wss" else 80)

    def load(streams: int) -> Run:
        with console.status(f"{streams} streams"):
            return run_load(url, api_key, port, ready, streams, processes, spread_s)

    return load


def _engine_load(audio: list[bytes], chunk_ms: int, device: str, spread_s: float) -> Callable[[int], Run]:
    """The same with the engine in this process; the server part registers it, since clients import none of it."""
    found = list(entry_points(group="mocha_asr.benchmarks", name="engine"))
    if not found:
        raise SourceError("--engine needs the server part of mocha-asr")
    try:
        run = found[0].load()(audio, chunk_ms, device)
    except ValueError as error:  # no usable checkpoint
        raise SourceError(str(error)) from error

    def load(streams: int) -> Run:
        with console.status(f"{streams} streams"):
            began_at = time.monotonic()
            done: dict[str, Any] = run(streams, spread_s)
        use = ServerUse(done["cores"], done["rss_before"], done["rss_during"])
        return Run([Measured(**row) for row in done["rows"]], began_at, use)

    return load


def _search(load: Callable[[int], Run], start: int, most: int, limit_ms: float) -> dict[str, Any]:
    """Double until it fails, then halve the gap down to 5 %; the report of the largest that kept up.

    Only what fails `TRIES` times counts as failed: a machine is slower now and then.
    """
    good: dict[str, Any] | None = None
    trials, low, high, streams = [], 0, most + 1, min(start, most)
    while True:
        for _ in range(TRIES):
            report = load(streams).report()
            fine = keeps_up(report, limit_ms)
            trials.append({"streams": streams, "kept_up": fine, "p50": report["emission_lag_ms"]["p50"]})
            trials[-1] |= {"p99": report["emission_lag_ms"]["p99"], "errors": report["errors"]}
            console.print(f"{streams} streams: {'kept up' if fine else 'too many'}, p99 {trials[-1]['p99']} ms")
            if fine:
                break
        if fine:
            good, low = report, streams
        else:
            high = streams
        if high - low <= max(1, low // 20) or low == most:
            return (good or report) | {"largest": low, "limit_ms": limit_ms, "trials": trials}
        streams = min(2 * low, most) if high > most else (low + high) // 2


@contextmanager
def _server() -> Iterator[str]:
    """A `mocha-asr serve` of our own on a free port, for as long as the block lasts; gives its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    main = "from mocha_client.cli import main; main()"
    command = [sys.executable, "-c", main, "serve", "--port", str(port)]
    process, direct = subprocess.Popen(command, stdout=sys.stderr), build_opener(ProxyHandler({}))
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while process.poll() is None and time.monotonic() < deadline:
            try:
                direct.open(f"http://127.0.0.1:{port}/health", timeout=1).close()
                break
            except OSError:  # not there yet, or not ready to answer
                time.sleep(0.1)
        else:
            raise SourceError("the server did not start")
        yield f"ws://127.0.0.1:{port}/v1/stream"
    finally:
        process.terminate()
        process.wait()


def _show(report: dict[str, Any]) -> None:
    table = Table(title=f"{report['streams']} streams")
    for heading in ("ms", *(f"p{q}" for q in PERCENTILES), "max"):
        table.add_column(heading, justify="right")
    for name in ("first_character_ms", "emission_lag_ms", "finalisation_ms", "sender_late_ms"):
        table.add_row(name.removesuffix("_ms"), *(str(value) for value in report[name].values()))
    out = Console()
    out.print(table)
    for name, value in report.items():
        if not isinstance(value, dict | list):
            out.print(f"{name}: {value}")
    for name in ("worst_client", "error_messages", "trials"):
        if report.get(name):
            out.print(f"{name}: {report[name]}")
