"""Eviction policies, one small file each; named in configuration through the entry-point group.

What the index does for one request, and all policies here are made for: the values that are there
are touched from leaf to root; the missing ones are inserted from root to leaf; then the whole
prefix is touched from leaf to root. So the first touch after ``insert`` ends the insertion: it sets
the order and is not counted as a reuse.
"""
