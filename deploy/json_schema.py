"""The JSON schema of a run file, for editors. `python -m deploy.json_schema` writes deploy/run-file.schema.json, which a test keeps fresh."""

from __future__ import annotations

import json
from pathlib import Path

from deploy.schema import RunFile

FILE = Path(__file__).with_name("run-file.schema.json")
SHARED = ("run_dir", "model")  # said once at the top of a file, and filled in below


def text() -> str:
    """The schema. What the launcher fills in from elsewhere in the file is not required of a section."""
    schema = RunFile.model_json_schema()
    for section in schema["$defs"].values():
        section["required"] = [name for name in section.get("required", []) if name not in SHARED]
        if not section["required"]:
            del section["required"]
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Headrace run file", **schema}, indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
