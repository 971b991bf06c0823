"""Groups of runs compared by interquartile means with intervals (docs/many-runs.md)."""
