"""The metrics that the gateway measures and exports for Prometheus."""
