"""Spans of OpenTelemetry, made from the timeline of a request when it has ended."""
