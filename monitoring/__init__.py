"""Prometheus rules and Grafana dashboards, and what writes and draws them."""
