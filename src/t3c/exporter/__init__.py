"""From an elastic model to an artifact: allocate, write, measure, certify."""

from t3c.exporter.export import ExportConfig, Exported, export

__all__ = ["ExportConfig", "Exported", "export"]
