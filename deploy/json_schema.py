"""The JSON schema of a run file, for editors: `headrace schema`."""

from __future__ import annotations

import json

from deploy.schema import RunFile

SHARED = ("run_dir", "model")  # said once at the top of a file, and filled in below


def text() -> str:
    """The schema. What the launcher fills in from elsewhere in the file is not required of a section."""
    schema = RunFile.model_json_schema()
    for section in schema["$defs"].values():
        section["required"] = [name for name in section.get("required", []) if name not in SHARED]
        if not section["required"]:
            del section["required"]
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Headrace run file", **schema}, indent=1) + "\n"
