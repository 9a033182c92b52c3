"""The Grafana dashboard of a run, and what makes it."""
