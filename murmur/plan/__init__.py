"""`murmur plan`: a forecast of a run on machines that are not here, by simulating its events."""
