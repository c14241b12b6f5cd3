"""What operators use: a connection for administration, and the commands made of it."""
