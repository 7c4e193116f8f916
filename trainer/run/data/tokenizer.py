"""Text to token ids: by byte, or by a Hugging Face tokenizer file."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from trainer.config.errors import ConfigError

logger = logging.getLogger(__name__)

#: names under which published tokenizers keep their end-of-document token
END_OF_DOCUMENT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")


class Tokenizer(Protocol):
    """What a corpus is built with."""

    #: number of token ids
    vocab_size: int
    #: id that ends a document; None: the tokenizer has none, and documents follow each other unmarked
    eod: int | None
    #: tokenizers of equal fingerprints give equal ids
    fingerprint: str

    def encode(self, text: bytes) -> np.ndarray:
        """Token ids of a whole document, without its end; shape [tokens], an unsigned or int64 type."""


class ByteTokenizer:
    """Ids are byte values. NUL, which text does not hold, ends a document."""

    vocab_size = 256
    eod: int | None = 0
    fingerprint = "byte"

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, dtype=np.uint8)


class FileTokenizer:
    """A Hugging Face tokenizer.json.

    Raises:
        ConfigError: the file is no tokenizer.
    """

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as HuggingFaceTokenizer

        self.fingerprint = hashlib.sha256(path.read_bytes()).hexdigest()
        try:
            self._tokenizer: Any = HuggingFaceTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(
                "data.tokenizer", f"{str(path)!r} is no tokenizer file ({error})", "Give a Hugging Face tokenizer.json"
            ) from error
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        # ids may have gaps, so the largest counts, not how many there are
        self.vocab_size = max(vocabulary.values()) + 1
        self.eod = next((vocabulary[name] for name in END_OF_DOCUMENT_NAMES if name in vocabulary), None)
        if self.eod is None:
            logger.warning("%s has no end-of-document token: documents follow each other unmarked", path)

    def encode(self, text: bytes) -> np.ndarray:
        encoding = self._tokenizer.encode(text.decode("utf-8"), add_special_tokens=False)
        return np.asarray(encoding.ids, dtype=np.int64)


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that data.tokenizer names."""
    return ByteTokenizer() if name == "byte" else FileTokenizer(Path(name).expanduser())
