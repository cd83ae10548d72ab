"""`headstart inspect`: what a checkpoint holds, from headers alone."""
