"""A small corpus that many tests train on."""

import io
import json
import tarfile
from pathlib import Path

import pytest

from mocha_training.data import Corpus, load_corpus
from tests.training.made_up import FIXTURES, TEXTS


@pytest.fixture(scope="session")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus directory in the layout that `train` reads."""
    directory = tmp_path_factory.mktemp("corpus")
    rows = []
    with tarfile.open(directory / "train-000.tar", "w") as tar:
        for number in range(6):
            name = list(TEXTS)[number % 2]
            data = (FIXTURES / f"{name}.wav").read_bytes()
            member = tarfile.TarInfo(f"k{number}.wav")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
            rows.append(
                {"key": f"k{number}", "shard": "train-000.tar", "text": TEXTS[name], "speaker": "s", "corpus": name}
            )
    path = directory / "train.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture(scope="session")
def corpus(manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return load_corpus(manifest, tmp_path_factory.mktemp("cache"))
