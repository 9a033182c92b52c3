"""The schema for editors says what a run file says."""

from __future__ import annotations

import json

import jsonschema
import pytest

from deploy.json_schema import text
from protos import yaml_text
from tests.templates import RUN_FILES


@pytest.mark.parametrize("file", RUN_FILES, ids=lambda file: file.stem)
def test_a_template_is_right_by_the_schema(file) -> None:
    jsonschema.validate(yaml_text.read(file.read_text()), json.loads(text()))


def test_an_unknown_key_is_wrong_by_the_schema() -> None:
    content = yaml_text.read(RUN_FILES[0].read_text())
    with pytest.raises(jsonschema.ValidationError, match="stepz"):
        jsonschema.validate({**content, "stepz": 1}, json.loads(text()))
