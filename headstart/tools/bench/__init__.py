"""`headstart bench`: an engine in this process or a server over HTTP measured, and what drafting saves."""
