"""Eviction policies, one small file each; named in configuration through the entry-point group.

For one request an index touches what is there from leaf to root, inserts the missing values from
root to leaf, and touches the whole prefix from leaf to root; or it inserts from leaf to root and does
not touch. In the first case the touch that follows ``insert`` sets the order and is no reuse (``queues.Fresh``).
"""
