"""vLLM: token ids in, token ids and log-probs out, each with its policy version."""

from engine.rollout.link import Child, children
from engine.rollout.prompts import render_prompts
from engine.rollout.sampler import Sampler, SamplerError, SamplerLost
from engine.rollout.samplers import Samplers
from engine.rollout.slot import SamplerStats

__all__ = [
    "Child",
    "Sampler",
    "SamplerError",
    "SamplerLost",
    "SamplerStats",
    "Samplers",
    "children",
    "render_prompts",
]
