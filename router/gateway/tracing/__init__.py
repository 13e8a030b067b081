"""OpenTelemetry spans, made from the timeline of a request when it has ended."""
