"""What the gateway measures and exports for Prometheus."""
