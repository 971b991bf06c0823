"""Many runs over configurations, settings and seeds (docs/many-runs.md)."""

from murmur.sweeps.run import run_sweep as run_sweep
