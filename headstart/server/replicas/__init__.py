"""Several engines on one machine, behind a router that exists."""
