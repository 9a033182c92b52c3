"""Alert rules and scrape configuration for Prometheus."""
