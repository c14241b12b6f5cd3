"""Owned rights to memory: reservations, leases, and the process that may hold them."""

from __future__ import annotations
