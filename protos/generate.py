"""Generates the committed stubs from the .proto files: `python -m protos.generate`, or `--check` to compare only.

Needs grpcio-tools in the pinned version, since another release writes other bytes.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def generate(folder: Path) -> None:
    """Writes every stub under `folder`, in the layout of the repository."""
    import grpc_tools
    from grpc_tools import protoc

    well_known = Path(grpc_tools.__file__).parent / "_proto"
    sources = sorted(str(file.relative_to(ROOT)) for file in (ROOT / "protos").rglob("*.proto"))
    options = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
    if protoc.main(["protoc", f"-I{ROOT}", f"-I{well_known}", *options, *sources]) != 0:
        raise SystemExit("protos: protoc refused the files, its own words are above")


def differences() -> list[str]:
    """Stubs that are missing, left over, or not what the .proto files give."""
    with tempfile.TemporaryDirectory() as name:
        fresh = Path(name)
        generate(fresh)
        made, committed = _stubs(fresh), _stubs(ROOT)
        return sorted(path for path in made.keys() | committed.keys() if made.get(path) != committed.get(path))


def _stubs(root: Path) -> dict[str, bytes]:
    files = (file for file in (root / "protos").rglob("*_pb2*") if file.name.endswith(SUFFIXES))
    return {str(file.relative_to(root)): file.read_bytes() for file in files}


def main() -> int:
    if "--check" not in sys.argv[1:]:
        generate(ROOT)
        return 0
    stale = differences()
    if stale:
        sys.stderr.write(f"protos: stale stubs, run `make protos` and commit: {', '.join(stale)}\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
