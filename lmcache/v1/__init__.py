"""Names that engines import."""
