"""Groups of runs compared by interquartile means with intervals (docs/many-runs.md)."""

from murmur.comparison.analysis import Comparison as Comparison
from murmur.comparison.analysis import compare as compare
