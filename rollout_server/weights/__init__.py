"""Weight updates of one replica: the transaction and what drives it."""
