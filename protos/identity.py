"""Who is who across processes: digests of what was loaded, and seeds that no two samples share."""

from __future__ import annotations

from pathlib import Path

import xxhash

from protos.mistakes import one_line

CONTRACT = "v1alpha1"
_SAMPLE_BYTES = 1 << 20


def weights_digest(folder: Path) -> str:
    """Digest of a Hugging Face folder's safetensors: names, sizes, headers, and 1 MiB at head, middle and tail of each file.

    Sampled, since it tells one checkpoint from another and need not catch bit rot (transfers carry digests of every byte).
    Raises FileNotFoundError when the folder holds no safetensors.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no *.safetensors in {folder}")
    digest = xxhash.xxh3_64()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            for offset in (0, max(0, size // 2), max(0, size - _SAMPLE_BYTES)):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """Digest of a whole file; "absent" where there is none, so that two sides without one agree."""
    return xxhash.xxh3_64(path.read_bytes()).hexdigest() if path.is_file() else "absent"


def tokenizer_digest(folder: Path) -> str:
    """Digest of tokenizer.json."""
    return file_digest(folder / "tokenizer.json")


def template_digest(folder: Path) -> str:
    """Digest of the chat template: chat_template.jinja where it is a file, else tokenizer_config.json that holds it."""
    jinja = folder / "chat_template.jinja"
    return file_digest(jinja if jinja.is_file() else folder / "tokenizer_config.json")


def group_seed(run_seed: int, group_id: str) -> int:
    """Seed of a group's first sample, in [0, 2**62)."""
    return xxhash.xxh3_64_intdigest(group_id.encode(), seed=run_seed & (2**63 - 1)) >> 2


def sample_seed(seed: int, sample_index: int) -> int:
    """Seed of one sample of a group, in [0, 2**62): mixed, not added, so that neighbouring groups do not overlap."""
    return xxhash.xxh3_64_intdigest(sample_index.to_bytes(8, "little"), seed=seed) >> 2


def continued_seed(seed: int, num_tokens: int) -> int:
    """Seed with which a sample of this seed is drawn on from token num_tokens by an engine that did not draw the tokens before: `seed` itself
    would repeat the random numbers of the first tokens. In [0, 2**62)."""
    return sample_seed(seed, (1 << 32) + num_tokens) if num_tokens else seed


def resolve_model(name: str) -> Path:
    """Local folder of a model: a folder as it is, a hub id through huggingface_hub (which reads its cache first).

    Raises ValueError naming what was tried when neither gives a folder with config.json.
    """
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        return folder.resolve()
    if folder.exists() or name.startswith(("/", ".", "~")):
        raise ValueError(f"model {name!r} is not a Hugging Face folder: {folder / 'config.json'} does not exist; give a folder that has one, or a hub id")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name))
    except Exception as error:  # the hub's client raises a dozen types; each means the same to the user
        said = one_line(error).rstrip(".; ")
        raise ValueError(f"model {name!r} is neither a folder here nor could it be fetched from the hub ({type(error).__name__}: {said}); give a folder (`make model` in a clone writes models/smollm2), or a hub id that can be reached from here") from error
