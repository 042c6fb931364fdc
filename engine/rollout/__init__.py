"""vLLM: token ids in, token ids and log-probs out, each with its policy version."""

from engine.rollout.prompts import render_prompts
from engine.rollout.sampler import Sampler, SamplerError, SamplerLost
from engine.rollout.samplers import Samplers, SamplerStats

__all__ = ["Sampler", "SamplerError", "SamplerLost", "SamplerStats", "Samplers", "render_prompts"]
