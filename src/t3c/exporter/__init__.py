"""From an elastic model to an artifact: allocate, write, measure, certify."""

from t3c.exporter.config import ExportConfig
from t3c.exporter.export import Exported, export
from t3c.exporter.timing import Timed, time_points

__all__ = ["ExportConfig", "Exported", "Timed", "export", "time_points"]
