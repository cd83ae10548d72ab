"""What `headstart inspect` finds out from headers: weights, parts, native heads, drafters, and whether they fit."""
