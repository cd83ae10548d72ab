from hub_server import hub as hub
