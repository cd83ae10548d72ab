"""`headstart inspect`: reports the contents of a checkpoint, from headers alone."""
