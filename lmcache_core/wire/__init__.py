"""The daemon's protocol and its client; engines and the command line need nothing else to talk to a daemon."""
