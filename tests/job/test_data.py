"""What a job reads: texts that are no texts, files that change, shards that rot."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.calibration.tiny_runs import contents
from tests.job.runs import Bench, Job, pieces

pytestmark = pytest.mark.serve

POISON = (
    b'{"prompt": "' + b"a" * (100 * 2**20) + b'"}',
    b'{"prompt": "caf\xe9 \xff\xfe"}',
    b'{"prompt": "\0"}',
    b'{"prompt": "\\u0000\\u0000"}',
    b'{"prompt": ""}',
)
SMALL = {"num_samples": 24, "generation_batch": 8, "max_new_tokens": 8, "steps": 8}


def poisoned(path: Path, num_good: int) -> Path:
    with path.open("wb") as stream:
        for number in range(num_good):
            stream.write(b'{"prompt": "Tell me %d things about the cat."}\n' % number)
            if number % 10 == 5 and number // 10 < len(POISON):
                stream.write(POISON[number // 10] + b"\n")
    return path


@pytest.fixture(scope="module")
def of_a_file(bench: Bench) -> Job:
    """A job that is done, with poison in its data, of which 0.8 % are allowed."""
    job = bench.job({**SMALL, "data": str(poisoned(bench.root / "data.jsonl", 600))})
    ended = bench.done(job)
    (bench.root / "of_a_file.err").write_text(ended.err)
    return job


def test_texts_that_cannot_be_used_are_skipped_and_counted(bench: Bench, of_a_file: Job) -> None:
    assert "5 of 605 could not be used" in (bench.root / "of_a_file.err").read_text()
    info = of_a_file.ledger["stages"]["dataset"]["info"]
    assert (info["num_bad"], info["num_seen"]) == (5, 605)
    records = b"".join(of_a_file.contents("dataset").values()).splitlines()
    assert len(records) == 24
    assert all(re.fullmatch(rb'{"prompt": "Tell me \d+ things about the cat."}', record) for record in records)


def test_more_than_one_in_a_hundred_that_cannot_be_used_end_the_job(bench: Bench) -> None:
    job = bench.job({**SMALL, "data": str(poisoned(bench.root / "worse.jsonl", 400))})
    ended = bench.run(job)
    assert ended.code == 2
    assert ended.reason.startswith("tide: error: data: ")
    assert "5 of 405 cannot, and 1 % may" in ended.reason
    assert not job.output.exists()
    assert job.shards("shards") == []


def test_a_data_file_that_has_changed_is_refused_with_the_difference(bench: Bench, of_a_file: Job) -> None:
    before, shards = contents(of_a_file.output), of_a_file.stamps()
    data = Path(of_a_file.settings["calibration"]["data"])
    size = data.stat().st_size
    with data.open("ab") as stream:
        stream.write(b'{"prompt": "One more."}\n')
    ended = bench.run(of_a_file)
    with data.open("r+b") as stream:
        stream.truncate(size)
    assert ended.code == 2
    assert ended.reason.startswith("tide: error: run ")
    assert re.search(r"1 changes.*data\.jsonl was '[0-9a-f]{10}.* and is '[0-9a-f]{10}", ended.reason)
    assert contents(of_a_file.output) == before
    assert of_a_file.stamps() == shards


def test_shards_that_have_rotted_are_made_again_and_no_others(bench: Bench, reference: Job) -> None:
    job = bench.again(reference, since="train", workers={"count": 1})
    flipped, cut, gone = names = [f"shards/train-{number:05d}.safetensors" for number in (1, 3, 4)]
    kept = {name: stamp for name, stamp in job.stamps().items() if name not in names}
    whole = bytearray((job.run / flipped).read_bytes())
    whole[-3] ^= 1
    (job.run / flipped).write_bytes(whole)
    (job.run / cut).write_bytes((job.run / cut).read_bytes()[:100])
    (job.run / gone).unlink()
    ended = bench.done(job)
    assert pieces(ended.err).keys() == set(names)
    assert "is missing or has changed" in ended.err
    assert kept.items() <= job.stamps().items()
    assert job.contents("shards") == reference.contents("shards")
    assert job.ledger["shards"] == reference.ledger["shards"]
    assert job.artefact.digest == reference.artefact.digest
