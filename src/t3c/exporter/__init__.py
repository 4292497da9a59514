"""From an elastic model to an artifact: allocate, write, measure, certify."""

from t3c.exporter.export import ExportConfig, Exported, Timed, export, time_points

__all__ = ["ExportConfig", "Exported", "Timed", "export", "time_points"]
