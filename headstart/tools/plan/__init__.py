"""What `headstart plan` computes with: shapes of models, devices, a roofline of one step, its fit to this machine."""
