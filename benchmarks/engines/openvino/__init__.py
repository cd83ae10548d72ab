"""OpenVINO GenAI: a server for it, since it has none."""
