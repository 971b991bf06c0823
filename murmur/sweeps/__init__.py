"""Many runs: grids, random search and Optuna over configurations and seeds (docs/many-runs.md)."""

from murmur.sweeps.run import run_sweep as run_sweep
