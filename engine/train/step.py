"""One optimizer step: graded groups in, changed weights and statistics out."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from transformers import PreTrainedModel

from engine.errors import InputError
from engine.recipe import Recipe
from engine.train.advantage import ADVANTAGES
from engine.train.layout import Trained, pack
from engine.train.loss import Rows, loss_of_rows, row_weights, tokens_of
from engine.train.memory import Gauge, StepMemory, is_out_of_memory, measure, out_of_memory, require_room
from engine.train.objective import AGGREGATES, CORRECTIONS, KLS, OBJECTIVES, SEQUENCE_LEVEL, LossSpec
from engine.train.policy import Policy
from engine.train.ranks import ALONE, Ranks
from engine.train.stats import Part, nothing_trained, step_stats
from engine.types import Batch, Graded, StepStats

NON_FINITE_STEPS = 10
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""AdamW's state of a parameter."""


@dataclass(frozen=True, slots=True)
class _Update:
    """One optimizer step before it runs."""

    batches: list[Batch]
    tokens: int
    """Trainable ones, also of completions that are left out of the forward for want of a signal."""
    completions: int
    """That have a trainable token."""
    old: tuple[torch.Tensor, ...] = ()
    """Log-probs of each batch of this rank at the step's start, where it makes more than one update."""


class Trainer:
    """The policy, its optimizer and the loss of a recipe; one of several alike where there are other ranks."""

    def __init__(self, recipe: Recipe, model: Path | PreTrainedModel, ranks: Ranks = ALONE) -> None:
        """model: see `Policy`, also for what is raised. Raises InputError for shards without other ranks."""
        if recipe.train.sharded and ranks.world == 1:
            raise InputError("train.sharded = true with one trainer: there is nobody to share with; start several")
        self._ranks = ranks
        self._gauge = Gauge(torch.device(recipe.train.device))
        how = recipe.full or recipe.lora
        assert how is not None  # a recipe has one of the two
        self.policy = Policy(
            model,
            dtype=recipe.model.dtype,
            device=recipe.train.device,
            how=how,
            seed=recipe.run.seed,
            keep_base=recipe.loss.kl > 0,
            checkpointing=recipe.train.checkpointing,
            sharded=recipe.train.sharded,
        )
        self.memory: StepMemory | None = None
        self._spec = loss_spec(recipe)
        self._recipe = recipe
        self._optimizer = torch.optim.AdamW(
            self.policy.trained.parameters,
            lr=recipe.optim.lr,
            betas=recipe.optim.betas,
            eps=recipe.optim.eps,
            weight_decay=recipe.optim.weight_decay,
            fused=True,
        )
        self._non_finite = 0

    def require_room(self) -> StepMemory | None:
        """Measure what a step takes, which each step's statistics say from then on; some seconds for a large model.

        None where layers are sharded: what is measured is a whole layer. Raises RunError where a full micro-batch will
        not fit into the memory that is free.
        """
        if self._recipe.train.sharded:
            return None
        self.memory = measure(self.policy)
        require_room(self.memory, self._recipe.train.token_budget, self.policy.device)
        return self.memory

    def state(self) -> dict[str, torch.Tensor]:
        """What the next step depends on, by name: fp32 masters, moments, torch's generators, the count of bad steps."""
        named = self.policy.trained.named_parameters
        found = {f"parameter.{name}": parameter.detach() for name, parameter in named.items()}
        for name, parameter in named.items():
            found |= {f"{key}.{name}": value for key, value in self._optimizer.state.get(parameter, {}).items()}
        found["non_finite"] = torch.tensor(self._non_finite)
        found["rng.cpu"] = torch.get_rng_state()
        if self.policy.device.type == "cuda":
            found["rng.cuda"] = torch.cuda.get_rng_state(self.policy.device)
        return found

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over what `state` gave. Raises InputError where its parameters are not this policy's."""
        self._ranks.tell("restore", tensors)
        named = self.policy.trained.named_parameters
        ours = {f"parameter.{name}": tuple(parameter.shape) for name, parameter in named.items()}
        theirs = {name: tuple(t.shape) for name, t in tensors.items() if name.startswith("parameter.")}
        if ours != theirs:
            odd = sorted(n for n in {*ours, *theirs} if ours.get(n) != theirs.get(n))[0]
            raise InputError(
                f"the checkpoint's {odd} has shape {theirs.get(odd)}, the recipe's model has {ours.get(odd)}: "
                f"go on with the recipe and the model that it was made with"
            )
        moments: dict[int, dict[str, torch.Tensor]] = {}
        for index, (name, parameter) in enumerate(named.items()):
            parameter.copy_(tensors[f"parameter.{name}"])
            found = {key: tensors[f"{key}.{name}"].clone() for key in MOMENTS if f"{key}.{name}" in tensors}
            if found:
                moments[index] = found
        self._optimizer.load_state_dict(self._optimizer.state_dict() | {"state": moments})
        self.policy.trained.updated()
        self._non_finite = int(tensors["non_finite"])
        torch.set_rng_state(tensors["rng.cpu"])
        if self.policy.device.type == "cuda" and "rng.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["rng.cuda"], self.policy.device)

    def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Log-prob of every token but the first, at temperature 1."""
        if self._recipe.train.sharded:
            self._ranks.tell("score", token_ids)  # all hold a part of the layers
        return self.policy.score(token_ids)

    def advantages(self, groups: Sequence[Sequence[Graded]]) -> list[list[float]]:
        """Advantage of each completion, group by group; INFRA counts for nothing and gets 0."""
        function = ADVANTAGES[self._recipe.loss.advantage]
        return [
            function(
                torch.tensor([math.nan if g.reward is None else g.reward for g in group], dtype=torch.float64)
            ).tolist()
            for group in groups
        ]

    def step(self, groups: Sequence[Sequence[Graded]], advantages: Sequence[Sequence[float]], step: int) -> StepStats:
        """Train the version that is step - 1 on the groups; each update's counts are taken before anything is cut.

        The statistics are the whole step's on rank 0; a rank that follows has none to tell.
        """
        self._ranks.tell("step", groups, advantages, step)
        lr = self._set_lr(step)
        updates = [self._plan(part) for part in self._parts(groups, advantages)]
        updates = [update for update in updates if update.batches]
        if not updates:
            return nothing_trained(lr)
        self._gauge.clear()
        try:
            if self._recipe.optim.updates > 1:
                updates = [replace(u, old=tuple(map(self._logprobs, self._passes(u.batches)))) for u in updates]
            done = [self._update(update) for update in updates]
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            largest = max(batch.input_ids.numel() for update in updates for batch in update.batches)
            said = str(error).splitlines()[0]
        else:
            said = ""
        if said:  # out of the handler, whose traceback keeps the step's tensors alive
            self._optimizer.zero_grad(set_to_none=True)
            raise out_of_memory(said, largest, self._recipe, self.memory, self.policy.device)
        predicted = max(self.memory.peak(update.batches) for update in updates) if self.memory else 0
        peak_mb = self._ranks.largest(self._gauge.height_mb())
        if not self._ranks.leads:
            return nothing_trained(lr)
        return step_stats(done, step - 1, lr, predicted_mb=predicted / 2**20, peak_mb=peak_mb)

    def _parts(self, groups: Sequence[Sequence[Graded]], advantages: Sequence[Sequence[float]]) -> list[list[Trained]]:
        """The trainable completions of each update: groups in their order, whole."""
        updates = min(self._recipe.optim.updates, len(groups))
        cuts = [len(groups) * i // updates for i in range(updates + 1)] if updates else [0]
        sizes = [len(group) for group in groups]
        return [self._trainable(groups[a:b], advantages[a:b], sum(sizes[:a])) for a, b in pairwise(cuts)]

    def _plan(self, chosen: Sequence[Trained]) -> _Update:
        # Without KL and entropy a group without a signal has no gradient: it stays in the counts, out of the forward.
        everywhere = self._spec.kl_coefficient > 0 or self._spec.entropy_coefficient > 0
        batches = pack(
            [t for t in chosen if t.advantage != 0.0 or everywhere],
            self._recipe.train.token_budget,
            share=self.policy.shares_prefixes,
            context_cost=self.policy.context_cost,
            multiple=self._ranks.world,
        )
        return _Update(batches, sum(len(t.rows) for t in chosen), sum(1 for t in chosen if t.rows))

    def _passes(self, batches: Sequence[Batch]) -> list[Batch]:
        """The micro-batches that this rank computes.

        Where layers are sharded every rank must run as many passes, so those with fewer run the smallest once more.
        """
        own = [batches[i] for i in self._ranks.share(len(batches))]
        rounds = -(-len(batches) // self._ranks.world) if self._recipe.train.sharded else len(own)
        return own + [min(batches, key=lambda batch: batch.input_ids.numel())] * (rounds - len(own))

    def _update(self, update: _Update) -> tuple[list[Part], float]:
        """One optimizer step; what each micro-batch came to, on whatever rank, and the gradient's norm."""
        self._optimizer.zero_grad(set_to_none=True)
        passes, own = self._passes(update.batches), len(self._ranks.share(len(update.batches)))
        parts = [
            self._micro_batch(batch, update, old, share=float(number < own))
            for number, (batch, old) in enumerate(zip(passes, update.old or [None] * len(passes), strict=True))
        ]
        parameters = self.policy.trained.parameters
        self._ranks.sum_gradients(parameters)
        norm = torch.nn.utils.clip_grad_norm_(parameters, self._recipe.optim.max_grad_norm)
        self._ranks.require_alike("gradients' norms", float(norm))
        self._apply(norm)
        return self._ranks.gather(parts[:own], len(update.batches)), float(norm)

    def _trainable(
        self, groups: Sequence[Sequence[Graded]], advantages: Sequence[Sequence[float]], first: int
    ) -> list[Trained]:
        members = [
            (g, a) for group, row in zip(groups, advantages, strict=True) for g, a in zip(group, row, strict=True)
        ]
        return [
            Trained(graded.completion, advantage, sequence)
            for sequence, (graded, advantage) in enumerate(members, first)
            if graded.reward is not None and not (self._recipe.loss.mask_truncated and graded.completion.truncated)
        ]

    def _micro_batch(self, batch: Batch, update: _Update, old: torch.Tensor | None, share: float) -> Part:
        """Forward and backward of one micro-batch; share: 0 for one that another rank counts, else 1."""
        device = self.policy.device
        lengths = batch.sequences.unique_consecutive(return_counts=True)[1].tolist()
        sampled = batch.sampled_logprobs.to(device)
        rows = Rows(
            sampled=sampled,
            advantages=batch.advantages.to(device),
            sequences=batch.sequences.to(device),
            weights=row_weights(lengths, self._spec, update.tokens, update.completions).to(device),
            step_tokens=update.tokens,
            old=sampled if self._recipe.loss.old == "sampler" else old,
            reference=self._reference_logprobs(batch) if self._spec.kl_coefficient else None,
        )
        state, targets = self._predicting_states(batch), batch.targets.to(device)
        temperature = self._recipe.rollout.temperature
        if SEQUENCE_LEVEL & {self._spec.objective, self._spec.correction}:
            logprobs, entropies = self.policy.logprobs(state, targets, temperature)
            loss = share * loss_of_rows(logprobs, entropies, rows, self._spec, slice(None))
        else:
            loss, logprobs, entropies = self.policy.loss(
                state,
                targets,
                lambda new, entropy, at: share * loss_of_rows(new, entropy, rows, self._spec, at),
                temperature,
            )
        loss.backward()
        new = logprobs.detach()
        _, clipped = OBJECTIVES[self._spec.objective](tokens_of(new, rows, slice(None)), self._spec)
        return Part(
            loss=float(loss.detach()),
            forward_tokens=batch.input_ids.numel(),
            logprobs=new.cpu(),
            entropies=entropies.detach().cpu(),
            started=(new if old is None else old).cpu(),
            sampled=batch.sampled_logprobs,
            clipped=clipped.cpu(),
            sequences=batch.sequences,
            versions=batch.versions,
            reference=None if rows.reference is None else rows.reference.cpu(),
        )

    def _predicting_states(self, batch: Batch) -> torch.Tensor:
        """`[N, hidden]`: the state that predicts each row's token."""
        state = self.policy.hidden(batch.input_ids.to(self.policy.device), batch.layout)
        return state.index_select(0, batch.predictors.to(self.policy.device))

    @torch.no_grad()
    def _logprobs(self, batch: Batch) -> torch.Tensor:
        """`[N]` fp32 under the present weights."""
        state, targets = self._predicting_states(batch), batch.targets.to(self.policy.device)
        return self.policy.logprobs(state, targets, self._recipe.rollout.temperature)[0]

    def _reference_logprobs(self, batch: Batch) -> torch.Tensor:
        """`[N]` fp32 under the model as it was before training."""
        with self.policy.base_model():
            return self._logprobs(batch)

    def _set_lr(self, step: int) -> float:
        optim, steps = self._recipe.optim, self._recipe.run.steps
        lr = optim.lr * learning_rate_factor(step, steps, optim.warmup, optim.schedule)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _apply(self, norm: torch.Tensor) -> None:
        if bool(norm.isfinite()):
            self._non_finite = 0
            self._optimizer.step()
            self.policy.trained.updated()
            return
        self._non_finite += 1
        if self._non_finite >= NON_FINITE_STEPS:
            named = self.policy.trained.named_parameters
            names = [n for n, p in named.items() if p.grad is not None and not bool(p.grad.isfinite().all())]
            raise FloatingPointError(
                f"{self._non_finite} steps in a row had a gradient that is no number, first in {names[:3]}; "
                f"lower optim.lr = {self._recipe.optim.lr:g} or train in float32"
            )


def loss_spec(recipe: Recipe) -> LossSpec:
    """The recipe's loss. Raises ValueError for a choice that no table has, naming the nearest."""
    loss = recipe.loss
    choices = (
        ("advantage", ADVANTAGES),
        ("objective", OBJECTIVES),
        ("correction", CORRECTIONS),
        ("aggregate", AGGREGATES),
        ("kl_estimator", KLS),
    )
    for key, table in choices:
        name = getattr(loss, key)
        if name not in table:
            near = difflib.get_close_matches(name, table, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"loss.{key} = {name!r}: must be one of {', '.join(table)}{hint}")
    return LossSpec(
        objective=loss.objective,
        correction=loss.correction,
        aggregate=loss.aggregate,
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        dual_clip=loss.dual_clip,
        delta=loss.delta,
        ratio_low=loss.ratio_low,
        ratio_high=loss.ratio_high,
        correction_low=loss.correction_low,
        correction_high=loss.correction_high,
        constant_length=recipe.rollout.max_tokens,
        kl=loss.kl_estimator,
        kl_coefficient=loss.kl,
        entropy_coefficient=loss.entropy,
    )


def learning_rate_factor(step: int, steps: int, warmup: int, schedule: str) -> float:
    """The share of the peak learning rate at `step` (from 1): linear warm-up, then the schedule down to 0."""
    if step <= warmup:
        return step / (warmup + 1)
    done = (step - 1 - warmup) / max(1, steps - warmup)
    if schedule == "linear":
        return 1 - done
    return (1 + math.cos(math.pi * done)) / 2 if schedule == "cosine" else 1.0
