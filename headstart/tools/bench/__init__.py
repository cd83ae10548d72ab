"""`headstart bench`: measures an engine in this process or a server over HTTP, and what drafting saves."""
