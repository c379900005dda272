"""Tokenizers of ``megatron-async data``: bytes, and Megatron's own.

Nothing here imports Megatron before one of its tokenizers is made.
"""

import argparse
import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_async.tools.documents import DataError

__all__ = [
    "BYTE_TOKENIZER_FLAGS",
    "ByteTokenizer",
    "MegatronTokenizer",
    "Tokenizer",
    "quiet_imports",
    "unknown_flags",
]

BYTE_TOKENIZER_FLAGS = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "256")
"""Megatron's flags for a model that trains on the tokens of :class:`ByteTokenizer`."""

_END_OF_DOCUMENT = 255
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}".encode()


class Tokenizer(Protocol):
    """What :func:`write_dataset` needs of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def training_flags(self) -> tuple[str, ...]:
        """Megatron's flags that choose the same tokenizer in training."""

    @property
    def replaced(self) -> int:
        """How many bytes of its documents it has replaced so far."""

    def encode(self, document: bytes) -> NDArray[np.integer[Any]]:
        """Return the token ids of a document, shape (tokens,), end-of-document token included.

        Raises:
            DataError: the document cannot be tokenized.
        """


class ByteTokenizer:
    """256 tokens, one per byte; token 255 ends a document."""

    vocab_size = 256
    training_flags = BYTE_TOKENIZER_FLAGS

    def __init__(self) -> None:
        self.replaced = 0
        """How many bytes of value 255 were replaced by U+FFFD so far."""

    def encode(self, document: bytes) -> NDArray[np.uint8]:
        """Return the bytes of a document, shape (tokens,), with token 255 at the end."""
        end = bytes([_END_OF_DOCUMENT])
        count = document.count(end)
        if count:
            self.replaced += count
            document = document.replace(end, _REPLACEMENT)
        return np.frombuffer(document + end, dtype=np.uint8)


class MegatronTokenizer:
    """One of Megatron's own tokenizers, chosen by Megatron's own flags.

    Args:
        tokenizer_type: a value of Megatron's ``--tokenizer-type``.
        flags: further tokenizer flags of Megatron, such as ``--tokenizer-model PATH``.

    Raises:
        DataError: the type or a flag is unknown, or the tokenizer cannot be made.
    """

    replaced = 0

    def __init__(self, tokenizer_type: str, flags: Sequence[str] = ()) -> None:
        parser = argparse.ArgumentParser(prog="megatron-async data", add_help=False)
        with quiet_imports():
            from megatron.core.tokenizers.utils import build_tokenizer as megatron_tokenizers

            from megatron_async.megatron.training import add_tokenizer_arguments

            add_tokenizer_arguments(parser)
        if tokenizer_type not in megatron_tokenizers.SUPPORTED_TOKENIZERS:
            known = ", ".join(["bytes", *megatron_tokenizers.SUPPORTED_TOKENIZERS])
            raise DataError(f"--tokenizer {tokenizer_type} is unknown; choose one of {known}.")
        self._made_from = (tokenizer_type, tuple(flags))
        self.training_flags = ("--tokenizer-type", tokenizer_type, *flags)
        args, unknown = parser.parse_known_args(self.training_flags)
        if unknown:
            raise unknown_flags(unknown)
        args.rank, args.pad_vocab_size = 0, False
        try:
            self._tokenizer = megatron_tokenizers.build_tokenizer(args)
            self.vocab_size = int(self._tokenizer.vocab_size)
            self._eod = int(self._tokenizer.eod)
        except Exception as error:  # whatever the tokenizer's library raises
            raise DataError(
                f"Megatron cannot build the tokenizer of {' '.join(self.training_flags)}: "
                f"{type(error).__name__}: {error}. Check its flags (--tokenizer-model, "
                "--vocab-file, --merge-file, ...) and that its library is installed "
                "(pip install 'megatron-async[tokenizers]')."
            ) from error

    def __reduce__(self) -> tuple[Any, ...]:
        """Other processes make their own: not every tokenizer's library can be pickled."""
        return MegatronTokenizer, self._made_from

    def encode(self, document: bytes) -> NDArray[np.int64]:
        """Return the token ids of a UTF-8 document, shape (tokens,), end of document included."""
        try:
            text = document.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"it is not UTF-8 ({error}); convert it, or leave it out") from error
        try:
            ids = self._tokenizer.tokenize(text)
        except Exception as error:
            raise DataError(f"the tokenizer failed: {type(error).__name__}: {error}") from error
        return np.array([*ids, self._eod], dtype=np.int64)


def unknown_flags(flags: Sequence[str]) -> DataError:
    """Return the error of flags that nobody knows."""
    return DataError(f"unknown arguments: {' '.join(flags)}. See megatron-async data --help.")


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Leave out what Megatron says on import about libraries that writing data does not need."""
    logger = logging.getLogger("torch.utils.cpp_extension")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
