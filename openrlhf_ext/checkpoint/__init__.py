"""Training state on disk: written whole or not at all, read back bit for bit, without pickle."""
