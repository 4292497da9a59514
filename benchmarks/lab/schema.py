"""The JSON files of an artifact as JSON Schema, for readers that are not this one."""

from __future__ import annotations

import json

from t3c.artifact.devices import DeviceTable
from t3c.artifact.ledger import Ledger
from t3c.artifact.manifest import Manifest
from t3c.artifact.plain import Record
from t3c.artifact.upgrade import SCHEMA_VERSION

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schemas() -> dict[str, str]:
    """Return the text of each schema, by its file name."""
    records: dict[str, type[Record]] = {
        "manifest": Manifest, "ledger": Ledger, "device": DeviceTable,
    }  # fmt: skip
    return {f"{name}.schema.json": _schema(name, kind) for name, kind in records.items()}


def _schema(name: str, kind: type[Record]) -> str:
    title = f"T3C {name}, schema version {SCHEMA_VERSION}"
    schema = kind.model_json_schema()
    return json.dumps({"$schema": DIALECT, **schema, "title": title}, indent=1) + "\n"
