"""One cache per node, hosted by a process that outlives every engine."""
