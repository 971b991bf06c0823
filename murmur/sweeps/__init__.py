"""Many runs over configurations, settings and seeds (docs/many-runs.md)."""
