"""headstart as one engine among others."""
