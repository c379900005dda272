"""The dataset of a study: made once in its folder, or found where the user has it."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from megatron_async.study.config import ConfigError, Dataset
from megatron_async.tools import corpora, data

__all__ = ["Prepared", "prepare"]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A dataset that can be trained on.

    Attributes:
        flags: Megatron's, paths included.
        identity: stands for its contents, wherever it lies.
    """

    flags: tuple[str, ...]
    identity: str


def prepare(dataset: Dataset, folder: Path) -> Prepared:
    """Make a dataset of bytes unless it is there already, or find the user's.

    Args:
        dataset: which.
        folder: of the study; a dataset of bytes goes into its folder ``data``.

    Raises:
        DataError: a file cannot be read or written.
        ConfigError: there is no dataset at the prefix.
    """
    if dataset.kind == "mock":
        return Prepared(flags=("--mock-data", *data.BYTE_TOKENIZER_FLAGS), identity="mock")
    if dataset.kind == "prefix":
        (prefix,) = dataset.paths
        return Prepared(
            flags=("--data-path", str(Path(prefix).resolve())), identity=_of_prefix(prefix)
        )
    prefix_path = folder / "data" / _file_name(dataset)
    digest = prefix_path.with_name(f"{prefix_path.name}.sha256")
    # Written last: without it, the dataset is not complete.
    if not digest.exists():
        if dataset.kind == "stdlib":
            inputs = corpora.standard_library()
        elif dataset.kind == "package":
            inputs = corpora.package_sources(*dataset.paths)
        else:
            inputs = data.find_inputs(dataset.paths)
        prefix_path.parent.mkdir(parents=True, exist_ok=True)
        data.write_dataset(
            inputs, prefix_path, tokenizer=data.ByteTokenizer(), overwrite=True, label="dataset"
        )
        digest.write_text(_sha256(prefix_path.with_name(f"{prefix_path.name}.bin")))
    return Prepared(
        flags=("--data-path", str(prefix_path.resolve()), *data.BYTE_TOKENIZER_FLAGS),
        identity=digest.read_text(),
    )


def _file_name(dataset: Dataset) -> str:
    if dataset.kind == "stdlib":
        return "stdlib"
    if dataset.kind == "package":
        return dataset.paths[0]
    return f"files-{hashlib.sha256(json.dumps(dataset.paths).encode()).hexdigest()[:10]}"


def _of_prefix(prefix: str) -> str:
    """The name and sizes: the contents may be terabytes."""
    sizes = []
    for suffix in ("bin", "idx"):
        path = Path(f"{prefix}.{suffix}")
        if not path.is_file():
            raise ConfigError(
                f"dataset.prefix: there is no file {path}. Make it with megatron-async data, or "
                "name yours with --set dataset.prefix=PATH."
            )
        sizes.append(path.stat().st_size)
    return json.dumps([Path(prefix).name, *sizes])


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
