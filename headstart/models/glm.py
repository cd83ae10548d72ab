"""GLM-4 before 0414 (9B, Edge).

As glm4, with norms before each part only. Formula: transformers `models/glm`.
"""

from dataclasses import replace
from functools import partial

from headstart.models import glm4
from headstart.models.names import Names

FAMILY = replace(
    glm4.FAMILY,
    parse=partial(glm4.parse, norms="pre"),
    names=Names(),
    aliases=("chatglm",),
    small={**glm4.FAMILY.small, "model_type": "glm", "architectures": ["GlmForCausalLM"]},
)
