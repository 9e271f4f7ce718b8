"""Figures of a run for other programs: OpenTelemetry and Prometheus. Nothing of it is needed."""

from quantroute.telemetry._otel import OpenTelemetryObserver
from quantroute.telemetry._prometheus import METRICS_PATH, RunFigures, exposition, served_metrics

__all__ = [
    "METRICS_PATH",
    "OpenTelemetryObserver",
    "RunFigures",
    "exposition",
    "served_metrics",
]
