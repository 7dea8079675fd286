"""The load generator against a real server: what it reports, what it finds wrong."""

import io
import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from mocha_client.bench import command
from mocha_client.bench.measurements import Measured, Run, keeps_up, percentile
from mocha_client.bench.speech import recorded, synthesized
from mocha_client.sources import SourceError
from mocha_model.recognizer import Recognizer
from mocha_server.engine_bench import prepare

FIXTURES = Path(__file__).parents[1] / "fixtures"
PERCENTILES = {"p50", "p90", "p95", "p99", "max"}
APP = typer.Typer()
APP.command()(command.bench)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recordings in a tar shard, as training data are kept."""
    directory = tmp_path_factory.mktemp("speech")
    with tarfile.open(directory / "a.tar", "w") as tar:
        for name in ("weather.ogg", "weather.mp3"):
            tar.add(FIXTURES / name, f"./{name}")
        for beside in ("weather.json", "weather.txt"):
            member = tarfile.TarInfo(beside)
            member.size = 2
            tar.addfile(member, io.BytesIO(b"{}"))
    path = directory / "dev.jsonl"
    path.write_text('{"key": "weather", "shard": "a.tar"}\n')
    return path


def bench(*arguments: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(APP, [*arguments, "--json"])
    return result.exit_code, json.loads(result.stdout)


def test_a_loaded_server_gives_every_stream_what_it_gives_one_alone(lively_server: Any, manifest: Path):
    options = ("--streams", "5", "--seconds", "3", "--clips", "2", "--chunk-ms", "20", "--processes", "2")
    code, report = bench("--url", lively_server.url, "--manifest", str(manifest), *options)
    assert code == 0
    assert (report["streams"], report["errors"], report["dropped"], report["mismatches"]) == (5, 0, 0, 0)
    for name in ("emission_lag_ms", "first_character_ms", "finalisation_ms", "sender_late_ms"):
        values = report[name]
        assert set(values) == PERCENTILES and 0 <= values["p50"] <= values["p99"] <= values["max"]
    assert 0 < report["rtfx"] < 5  # it is paced
    assert report["server_cpu_cores"] > 0 and isinstance(report["server_rss_bytes_per_stream"], int)
    assert 0 <= report["worst_client"]["stream"] < 5


def test_refused_streams_are_errors(make_server: Any, lively: Recognizer, manifest: Path):
    small = make_server(lively, max_streams=2)
    options = ("--streams", "4", "--seconds", "1", "--clips", "1")
    code, report = bench("--url", small.url, "--manifest", str(manifest), *options)
    assert code == 1 and report["errors"] == 2 and "server_full" in report["error_messages"][0]


def test_a_server_that_wants_a_key(keyed_server: Any, manifest: Path, monkeypatch: pytest.MonkeyPatch):
    options = ("--url", keyed_server.url, "--manifest", str(manifest), "--streams", "2", "--seconds", "1")
    monkeypatch.setenv("MOCHA_API_KEY", "wrong")
    refused = CliRunner().invoke(APP, [*options, "--clips", "1"])
    assert refused.exit_code == 1 and "wants its key (HTTP 401)" in refused.output and "wrong" not in refused.output
    code, report = bench(*options, "--clips", "1", "--api-key", keyed_server.key)
    assert code == 0 and report["errors"] == report["mismatches"] == 0


def test_no_server_and_no_speech(lively_server: Any, manifest: Path, tmp_path: Path):
    options = ("--seconds", "1", "--clips", "1", "--manifest")
    realtime = lively_server.url.replace("stream", "realtime")
    other = CliRunner().invoke(APP, [*options, str(manifest), "--url", realtime])
    assert other.exit_code == 1 and "not /v1/stream of a mocha-asr server" in other.output
    nobody = CliRunner().invoke(APP, [*options, str(manifest), "--url", "ws://127.0.0.1:1/v1/stream"])
    assert nobody.exit_code == 1 and "error:" in nobody.output
    nothing = CliRunner().invoke(APP, [*options, str(tmp_path / "none.jsonl")])
    assert nothing.exit_code == 1 and "not a readable manifest" in nothing.output


def test_what_cannot_be_measured_is_said(manifest: Path, monkeypatch: pytest.MonkeyPatch):
    options = ["--seconds", "1", "--clips", "1", "--manifest", str(manifest)]
    device = CliRunner().invoke(APP, [*options, "--engine", "--device", "gpu"])
    assert device.exit_code == 1 and "error: --device gpu: there is cpu" in device.output
    assert CliRunner().invoke(APP, [*options, "--search", "--most", "0"]).exit_code == 2
    for useless, message in (
        (["--engine", "--serve"], "--serve: without effect beside --engine"),
        (["--serve", "--url", "ws://x"], "--url: without effect beside --serve"),
        (["--engine", "--processes", "2"], "--processes: without effect beside --engine"),
        (["--serve", "--api-key", "x"], "--api-key: without effect beside --serve"),
        (["--device", "cpu"], "--device: without effect without --engine"),
        (["--limit-ms", "200"], "--limit-ms: without effect without --search"),
    ):
        refused = CliRunner().invoke(APP, [*options, *useless])
        assert refused.exit_code == 2 and message in refused.output
    monkeypatch.setenv("MOCHA_MODEL", "nope")
    command = [str(Path(sys.executable).with_name("mocha-asr")), "bench", *options, "--serve"]
    unable = subprocess.run(command, capture_output=True, text=True, check=False)
    assert unable.returncode == 1 and unable.stderr.endswith("error: the server did not start\n")


@pytest.mark.parametrize("bad", ["", "{", '{"key": "weather"}', '{"key": "other", "shard": "a.tar"}'])
def test_bad_manifests(manifest: Path, bad: str):
    path = manifest.with_name("bad.jsonl")
    path.write_text(bad)
    with pytest.raises(SourceError):
        recorded(path, 1, 1.0)


@pytest.mark.skipif(not (shutil.which("espeak-ng") or shutil.which("flite")), reason="needs espeak-ng or flite")
def test_clips_have_the_length_asked_for_and_differ():
    clips = synthesized(3, 2.5)
    assert [len(clip) for clip in clips] == [2 * 40_000] * 3 and len(set(clips)) == 3


def test_percentiles_are_values_that_were_measured():
    assert [percentile([3.0, 1.0, 2.0, 4.0], q) for q in (1, 50, 51, 75, 99, 100)] == [1, 2, 3, 3, 4, 4]
    assert percentile([7.0], 50) == 7


def ran(streams: int, lag_s: float, error: str | None = None) -> Run:
    rows = [Measured(i, 1.0, 0.1, [lag_s], 0.1, [0.0], 1.0) for i in range(streams)]
    rows[-1].error = error
    return Run(rows, 0.0, None)


def test_keeping_up_is_no_error_and_a_small_lag():
    assert keeps_up(ran(3, 0.3).report(), 300)
    assert not keeps_up(ran(3, 0.301).report(), 300)
    assert not keeps_up(ran(3, 0.1, "server_full").report(), 300)


@pytest.mark.parametrize(("holds", "start"), [(137, 50), (137, 1000), (1, 50), (5000, 50)])
def test_search_finds_the_most_streams_within_a_twentieth(holds: int, start: int):
    report = command._search(lambda streams: ran(streams, 0.1 if streams <= holds else 1.0), start, 2000, 300)
    assert report["largest"] == report["streams"] if holds > 1 else report["largest"] <= 1
    assert min(holds, 2000) * 0.95 - 1 <= report["largest"] <= min(holds, 2000)
    assert all(trial["kept_up"] == (trial["streams"] <= holds) for trial in report["trials"])


def test_what_fails_once_is_tried_again():
    seen: set[int] = set()

    def load(streams: int) -> Run:
        slow = streams > 137 or streams not in seen
        seen.add(streams)
        return ran(streams, 1.0 if slow else 0.1)

    report = command._search(load, 50, 2000, 300)
    assert 130 <= report["largest"] <= 137
    assert [t["kept_up"] for t in report["trials"] if t["streams"] == 50] == [False, True]


def test_the_engine_alone(manifest: Path):
    clips = recorded(manifest, 2, 1.5)
    done = prepare(clips, 100, "cpu")(3, 0.5)
    report = Run([Measured(**row) for row in done["rows"]], 0.0, None).report()
    assert (report["streams"], report["errors"], report["mismatches"]) == (3, 0, 0)
    assert done["cores"] > 0
