"""``lmcache nixl-target``: lend memory of this node to the tiers of others."""

import typer

app = typer.Typer(add_completion=False, rich_markup_mode=None)
