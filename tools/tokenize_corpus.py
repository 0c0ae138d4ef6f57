#!/usr/bin/env python
"""Text, JSONL (also .gz, .zst) or Parquet to memory-mapped token shards, in parallel, resumable.

    python tools/tokenize_corpus.py corpus/ --tokenizer bytes --out tokens/
    python tools/tokenize_corpus.py 'corpus/*.jsonl.zst' --tokenizer /data/llama3 --out tokens/ --workers 8

One shard a chunk of documents. Started again with the same arguments it goes on after the last whole shard. Then train
with training.dataset = "tokens" and training.dataset_path = "tokens/". Needs the extra data for .zst and Parquet.
"""

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import _environment  # noqa: F401

from titanlite.errors import UserError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", nargs="+", help="files, folders or globs")
    parser.add_argument("--tokenizer", required=True, help="as model.hf_assets_path: a folder, or `bytes`")
    parser.add_argument("--out", required=True, type=Path, help="folder of the shards")
    parser.add_argument(
        "--dataset", choices=["text", "jsonl", "parquet"], help="kind of the input; default: by its names"
    )
    parser.add_argument("--text-key", default="text", help="field that holds the text")
    parser.add_argument("--documents-per-shard", type=int, default=50_000)
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--skip-bad", action="store_true", help="pass over records that cannot be read, and count them")
    arguments = parser.parse_args()
    try:
        return run(arguments)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


def run(arguments: argparse.Namespace) -> int:
    """Tokenize what is missing, and write the manifest when all shards are there."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from titanlite.data.shards import write_manifest
    from titanlite.data.sources import build_source
    from titanlite.data.tokenizer import build_tokenizer

    tokenizer = build_tokenizer(arguments.tokenizer)
    arguments.out.mkdir(parents=True, exist_ok=True)
    jobs = []
    for path in arguments.input:
        kind = arguments.dataset or kind_of(path)
        documents = len(build_source(kind, path, tokenizer, arguments.text_key))
        for begin in range(0, documents, arguments.documents_per_shard):
            end = min(begin + arguments.documents_per_shard, documents)
            job = {"kind": kind, "path": path, "begin": begin, "end": end, "key": arguments.text_key}
            jobs.append(
                job
                | {"tokenizer": arguments.tokenizer, "skip": arguments.skip_bad, "fingerprint": tokenizer.fingerprint}
            )
    columns = (TextColumn("shards"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    entries: dict[int, dict] = {}
    with (
        Progress(*columns, disable=not sys.stderr.isatty()) as progress,
        ProcessPoolExecutor(arguments.workers) as pool,
    ):
        task = progress.add_task("", total=len(jobs))
        todo = {}
        for number, job in enumerate(jobs):
            done = finished(arguments.out, number, job)
            if done is not None:
                entries[number] = done
                progress.advance(task)
            else:
                todo[pool.submit(shard, arguments.out, number, job)] = number
        for future in as_completed(todo):
            entries[todo[future]] = future.result()
            progress.advance(task)
    ordered = [entries[number] for number in range(len(jobs))]
    write_manifest(arguments.out, tokenizer, ordered)
    tokens, skipped = sum(e["tokens"] for e in ordered), sum(e["skipped"] for e in ordered)
    print(
        f"{tokens:,} tokens of {sum(e['documents'] for e in ordered):,} documents in {len(ordered)} shards, {skipped} records skipped: {arguments.out}"
    )
    return 0


def kind_of(path: str) -> str:
    """What a path most likely holds."""
    names = [file.name for file in Path(path).rglob("*")] if Path(path).is_dir() else [path]
    for kind, part in (("jsonl", ".json"), ("parquet", ".parquet")):
        if any(part in name for name in names):
            return kind
    return "text"


def finished(out: Path, number: int, job: dict) -> dict | None:
    """The entry of a shard that an earlier start finished from the same job, or None."""
    note = out / f"{number:05}.json"
    if not note.is_file():
        return None
    told = json.loads(note.read_text())
    file = out / f"{number:05}.bin"
    return told["entry"] if told["job"] == job and file.is_file() else None


def shard(out: Path, number: int, job: dict) -> dict:
    """Tokenize the documents of one job."""
    from titanlite.data.mixture import Documents, Part, Settings
    from titanlite.data.shards import token_dtype, write_shard
    from titanlite.data.sources import BadRecord, build_source
    from titanlite.data.tokenizer import build_tokenizer

    tokenizer = build_tokenizer(job["tokenizer"])
    source = build_source(job["kind"], job["path"], tokenizer, job["key"])
    documents = Documents([Part("input", source, 1.0)], tokenizer, 0, 1, Settings(shuffle=False))
    skipped = 0

    def tokens():
        nonlocal skipped
        for index in range(job["begin"], job["end"]):
            try:
                yield documents.read(0, index).tokens
            except BadRecord as bad:
                if not job["skip"]:
                    raise UserError(f"{bad}; --skip-bad passes over such records") from None
                skipped += 1

    name = f"{number:05}"
    entry = write_shard(out, name, tokens(), token_dtype(tokenizer.vocab_size)) | {"skipped": skipped}
    note = out / f"{name}.json.tmp"
    note.write_text(json.dumps({"job": job, "entry": entry}))
    note.replace(out / f"{name}.json")
    return entry


if __name__ == "__main__":
    sys.exit(main())
