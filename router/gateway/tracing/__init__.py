"""OpenTelemetry spans, made from the timeline of a request after its end."""
