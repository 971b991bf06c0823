"""Prometheus rules and Grafana dashboards, and the code that writes and draws them."""
