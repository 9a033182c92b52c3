"""Templates as a user would load them; certificates and token of those that want some are made for the test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.certificates import Authority

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "deploy" / "templates"
REPLICAS = ("far-replica",)  # fields of a replica's configuration, not a run file
RUN_FILES = sorted(file for file in FOLDER.glob("*.yaml") if file.stem not in REPLICAS)


def overrides(file: Path, folder: Path) -> dict[str, Any]:
    """What stands in for the user's own secrets."""
    if "certificates/" not in file.read_text():
        return {}
    authority = Authority(folder)
    certificate, key = authority.sign("server", days=1)
    (folder / "token").write_text("t0ken")
    section = {"ca": str(authority.ca), "token_file": str(folder / "token")}
    return {"security": section if file.stem in REPLICAS else {**section, "certificate": str(certificate), "key": str(key)}}
