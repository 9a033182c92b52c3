"""Which ids of a model have text. Both ends of a run take it from here: what an engine never draws has no share in what the learner evaluates.

    vocabulary of tokenizer.json      0 1 2 . 4 5          a hole at 3
    rows of the model's head          0 1 2 3 4 5 6 7      padding at 6 and 7
    without text, hence never drawn         3     6 7

The rule reads tokenizer.json alone, since that is the file whose digest a replica shows when it attends: two ends with the same file have the same ids.
"""

from __future__ import annotations

from pathlib import Path


def ids_with_text(folder: Path) -> frozenset[int] | None:
    """Every id that a Hugging Face folder's tokenizer.json knows, added tokens among them; None where there is no such file."""
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    return frozenset(Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True).values()) if file.is_file() else None


def ids_without_text(known: frozenset[int], num_rows: int) -> tuple[int, ...]:
    """Ids below num_rows, the rows of a model's head, that are not known; ascending. Known ids at or above num_rows have no row and change nothing.

    Raises ValueError where nothing is left to be drawn.
    """
    missing = tuple(sorted(set(range(num_rows)).difference(known)))
    if len(missing) == num_rows:
        raise ValueError(f"the tokenizer's {len(known)} ids have none in common with the {num_rows} rows of the model's head; the folder holds files of two models")
    return missing
