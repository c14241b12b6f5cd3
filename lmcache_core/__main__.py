"""``python -m lmcache_core`` is the ``lmcache`` command."""

from lmcache_core.cli import main

raise SystemExit(main())
