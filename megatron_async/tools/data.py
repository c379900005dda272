"""``megatron-async data``: text files to Megatron's .bin/.idx.

A text file is one document; a ``.jsonl``, ``.jsonl.gz`` or ``.jsonl.zst`` file has one document per
line, a ``.parquet`` file one per row. Every document ends with the tokenizer's end-of-document
token. Neither a GPU nor ``torch.distributed`` is needed. Reading is in :mod:`.documents`, the
tokenizers in :mod:`.tokenizing`, writing in :mod:`.dataset_writer`.

The tokenizer ``bytes`` has the 256 bytes as its tokens. Training reads it as Megatron's
``NullTokenizer`` with ``--vocab-size 256``, whose end-of-document token is 255: a byte that UTF-8
never uses. Where a file that is not UTF-8 contains it, U+FFFD is written instead.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_async.tools.dataset_writer import Summary, write_dataset
from megatron_async.tools.documents import DataError, Input, find_inputs, read_documents
from megatron_async.tools.tokenizing import (
    BYTE_TOKENIZER_FLAGS,
    ByteTokenizer,
    MegatronTokenizer,
    Tokenizer,
    unknown_flags,
)

__all__ = [
    "BYTE_TOKENIZER_FLAGS",
    "ByteTokenizer",
    "DataError",
    "Input",
    "MegatronTokenizer",
    "Summary",
    "Tokenizer",
    "find_inputs",
    "main",
    "read_documents",
    "split_flags",
    "write_dataset",
]


def main(argv: Sequence[str]) -> int:
    """Run ``megatron-async data`` with these arguments and return its exit status."""
    parser = _make_parser()
    args, rest = parser.parse_known_args(argv)
    try:
        tokenizer: Tokenizer
        if args.tokenizer == "bytes":
            if rest:
                raise unknown_flags(rest)
            tokenizer = ByteTokenizer()
        else:
            tokenizer = MegatronTokenizer(args.tokenizer, rest)
        prefix = Path(args.output.removesuffix(".bin").removesuffix(".idx"))
        inputs = find_inputs(args.input)
        summary = write_dataset(
            inputs,
            prefix,
            tokenizer=tokenizer,
            json_key=args.json_key,
            overwrite=args.overwrite,
            workers=args.workers,
        )
    except DataError as error:
        print(f"megatron-async data: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("megatron-async data: interrupted; the same command goes on", file=sys.stderr)
        return 130
    left_out = f", {summary.empty} without text left out" if summary.empty else ""
    files = "file" if len(inputs) == 1 else "files"
    print(f"documents  {summary.documents:,}")
    print(f"tokens     {summary.tokens:,} (vocabulary {tokenizer.vocab_size:,})")
    print(f"bytes      {summary.bytes_read:,} read from {len(inputs):,} {files}{left_out}")
    print(f"written    {prefix}.bin ({summary.bytes_written:,} bytes), {prefix}.idx")
    if summary.replaced:
        print(f"replaced   {summary.replaced:,} bytes 255, which are not UTF-8, by U+FFFD")
    flags = [*tokenizer.training_flags, *split_flags(summary.documents)]
    print(f"train with --data-path {prefix} {' '.join(flags)}")
    return 0


def split_flags(documents: int) -> tuple[str, ...]:
    """Return the flags that split so few documents into training, validation and test sets.

    Megatron splits by whole documents, 969 to 30 to 1 by default, and looks for ever for samples in
    a set that gets none (``_get_num_epochs`` in megatron/core/datasets/gpt_dataset.py).
    """
    if documents >= 1000:
        return ()
    if documents >= 10:
        return ("--split", "90,10,0")
    return ("--split", "50,50,0") if documents > 1 else ("--split", "1,0,0", "--eval-iters", "0")


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-async data",
        description="Write text as Megatron's .bin/.idx files. Tokenizer flags of Megatron, such "
        "as --tokenizer-model PATH, may follow. A command that was killed goes on where it was "
        "when it is given again.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files, directories or globs; a .jsonl, .jsonl.gz or .jsonl.zst file has a document "
        "per line, a .parquet file one per row, any other file is one document",
    )
    parser.add_argument(
        "--output", required=True, metavar="PREFIX", help="writes PREFIX.bin and PREFIX.idx"
    )
    parser.add_argument(
        "--tokenizer",
        default="bytes",
        metavar="TYPE",
        help="bytes (the default: 256 tokens), or a value of Megatron's --tokenizer-type",
    )
    parser.add_argument(
        "--json-key",
        default="text",
        metavar="KEY",
        help="the text's key in lines of JSON, or its column in .parquet files",
    )
    parser.add_argument(
        "--workers",
        type=_workers,
        default=1,
        metavar="N",
        help="how many processes tokenize; the output is the same for any number. Default: 1",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace existing output")
    return parser


def _workers(text: str) -> int:
    workers = int(text)
    if workers < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return workers
