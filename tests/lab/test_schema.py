"""The published JSON Schemas: they are what the code has, and what artifacts keep to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from conftest import Made
from lab.schema import schemas
from t3c.artifact.folder import MANIFEST
from t3c.artifact.reader import DEVICES, LEDGER

PUBLISHED = Path(__file__).parents[2] / "docs" / "schema"


def test_what_is_published_is_what_the_code_has() -> None:
    """`make docs` writes them."""
    for name, text in schemas().items():
        assert (PUBLISHED / name).read_text() == text


def schema(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(schemas()[f"{name}.schema.json"])
    jsonschema.Draft202012Validator.check_schema(found)
    return found


def test_an_artifact_keeps_to_them(made: Made) -> None:
    jsonschema.validate(json.loads((made.artifact / MANIFEST).read_text()), schema("manifest"))
    jsonschema.validate(json.loads((made.artifact / LEDGER).read_text()), schema("ledger"))
    tables = list((made.artifact / DEVICES).glob("*.json"))
    assert tables
    for table in tables:
        jsonschema.validate(json.loads(table.read_text()), schema("device"))


@pytest.mark.parametrize("key", ["layers", "profiles", "schema_version", "files"])
def test_what_lacks_something_does_not(made: Made, key: str) -> None:
    data = json.loads((made.artifact / MANIFEST).read_text())
    del data[key]
    with pytest.raises(jsonschema.ValidationError, match=key):
        jsonschema.validate(data, schema("manifest"))
