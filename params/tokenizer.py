"""Words into pieces, by a vocabulary that is learnt from the training text.

SentencePiece's unigram model on the text as it is: nothing is normalised, and
what is in no piece is written as its UTF-8 bytes, so decoding gives back any
text but for runs of spaces.

A trained vocabulary is kept in a folder, under a name made of the texts and the
settings: the same training is done once. The folder is that of the environment
variable TFGPIPE_CACHE, else ~/.cache/tfgpipe; it can be deleted.

Reference: [Kudo, 2018](https://arxiv.org/abs/1804.10959)
"""

import hashlib
import io
import json
import os
import pathlib
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

PAD_ID, BOS_ID, EOS_ID, UNK_ID = 0, 1, 2, 3

_NUM_BYTES = 256
_SETTINGS = {
    "model_type": "unigram",
    "normalization_rule_name": "identity",
    "byte_fallback": True,
    "character_coverage": 0.9995,
    "hard_vocab_limit": False,
    "pad_id": PAD_ID,
    "bos_id": BOS_ID,
    "eos_id": EOS_ID,
    "unk_id": UNK_ID,
    "num_threads": 2,  # sums are rounded by it
    "max_sentence_length": 2**16,  # bytes
    "minloglevel": 2,
}


class Tokenizer:
    """Cuts text into pieces and joins them again.

    Args:
        model: A trained SentencePiece model, the content of its file.

    Attributes:
        model: The same.
        vocab_size: Number of pieces, the special ones included. Ids are below.

    Raises:
        ValueError: If `model` is something else.
        ImportError: If SentencePiece is not installed.
    """

    def __init__(self, model: bytes) -> None:
        self.model = model
        try:
            if not model:
                raise RuntimeError("nothing in it")
            self._processor = _sentencepiece().SentencePieceProcessor(
                model_proto=model
            )
        except RuntimeError as error:
            raise ValueError(
                "`model` must be a trained SentencePiece model. Received: "
                f"{len(model)} bytes, which give: {error}."
            ) from error
        self.vocab_size = self._processor.get_piece_size()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text's pieces, without begin and end."""
        return self._processor.encode(list(texts), out_type=int)

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Texts of ids; each ends before its first `EOS_ID`.

        Padding, the begin and other symbols that stand for no text are left
        out.
        """
        rows = [[int(i) for i in row] for row in ids]
        rows = [
            row[: row.index(EOS_ID)] if EOS_ID in row else row for row in rows
        ]
        texts = [[i for i in row if not self._is_symbol(i)] for row in rows]
        return self._processor.decode(texts) if texts else []

    def _is_symbol(self, token: int) -> bool:
        """Whether it stands for no text; a model may have more ids than us."""
        if token >= self.vocab_size or token == UNK_ID:
            return True
        return self._processor.is_control(token)

    def symbol_id(self, symbol: str) -> int:
        """The id of a symbol that was given to `train_tokenizer`.

        Raises:
            ValueError: If it was not.
        """
        token = self._processor.piece_to_id(symbol)
        if token == UNK_ID or not self._processor.is_control(token):
            raise ValueError(
                "`symbol` must be one that the tokenizer was trained with. "
                f"Received: symbol={symbol!r}."
            )
        return token


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    *,
    symbols: Sequence[str] = (),
    cache_dir: pathlib.Path | None = None,
) -> Tokenizer:
    """Learns a vocabulary from texts, or reads the one learnt before.

    Args:
        texts: What to learn from; empty ones are skipped.
        vocab_size: Most pieces to have, with 256 for the bytes, 4 special ones
            and `symbols`. Little text gives fewer.
        symbols: Pieces that no text contains, such as "<2en>".
        cache_dir: Folder where vocabularies are kept. Defaults to TFGPIPE_CACHE
            or ~/.cache/tfgpipe. It is made if need be; where it cannot be
            written to, nothing is kept.

    Raises:
        ValueError: If there is no text, or `vocab_size` is too small for the
            characters in it.
        ImportError: If SentencePiece is not installed.
    """
    texts = [text for text in texts if text]
    smallest = _NUM_BYTES + UNK_ID + 1 + len(symbols)
    if vocab_size <= smallest:
        raise ValueError(
            f"`vocab_size` must be more than {smallest}, which are "
            f"{_NUM_BYTES} bytes and the special pieces. "
            f"Received: vocab_size={vocab_size}."
        )
    if not texts:
        raise ValueError(
            "`texts` must hold some text. Received: nothing, or empty strings."
        )
    settings = {
        **_SETTINGS,
        "vocab_size": vocab_size,
        "control_symbols": list(symbols),
    }
    path = (cache_dir or default_cache_dir()) / _cache_name(texts, settings)
    if (kept := _read(path)) is not None:
        return kept
    tokenizer = Tokenizer(_train(texts, settings))
    _write(path, tokenizer.model)
    return tokenizer


def default_cache_dir() -> pathlib.Path:
    """The folder of TFGPIPE_CACHE, or else ~/.cache/tfgpipe."""
    given = os.environ.get("TFGPIPE_CACHE")
    return pathlib.Path(given or "~/.cache/tfgpipe").expanduser()


def _cache_name(texts: Sequence[str], settings: dict[str, Any]) -> str:
    """A file name for what these texts and settings give."""
    version = _sentencepiece().__version__
    digest = hashlib.sha256(
        json.dumps([version, settings], sort_keys=True).encode("utf-8")
    )
    for text in texts:
        digest.update(text.encode("utf-8") + b"\n")
    return f"{digest.hexdigest()}.sentencepiece"


def _read(path: pathlib.Path) -> Tokenizer | None:
    """What was kept; None if there is nothing, or nothing whole."""
    try:
        return Tokenizer(path.read_bytes())
    except (OSError, ValueError):
        return None


def _write(path: pathlib.Path, model: bytes) -> None:
    """Keeps a model; other processes see all of it or nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(model)
        os.replace(partial, path)
    except OSError as error:
        warnings.warn(
            f"The vocabulary cannot be kept in {path.parent}: {error}. It will "
            "be learnt again next time. Name another folder in TFGPIPE_CACHE.",
            stacklevel=3,
        )


def _train(texts: Sequence[str], settings: dict[str, Any]) -> bytes:
    model = io.BytesIO()
    try:
        _sentencepiece().SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_writer=model, **settings
        )
    except RuntimeError as error:
        raise ValueError(
            "`vocab_size` must be large enough for the characters of the "
            f"texts. Received: vocab_size={settings['vocab_size']} and "
            f"{len(texts)} texts, which give: {error}."
        ) from error
    return model.getvalue()


def _sentencepiece() -> Any:
    """The package, or an error that says how to get it."""
    with warnings.catch_warnings():
        # Its types are made by an old SWIG, of which Python 3.12 warns.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            import sentencepiece
        except ImportError as error:
            raise ImportError(
                "The package sentencepiece is needed for texts, and is not "
                "installed. Install it: pip install '.[text]'"
            ) from error
    return sentencepiece
