"""Memory of a node: arena segments, exact-size extents, the index of values, leases."""
