"""TRL's GRPOTrainer set up as a recipe says: the same LoRA, loss, optimizer and precision, on the CPU.

Nothing of TRL is replaced: its own `train()` runs, and a callback reads the clocks where its steps begin and end.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from engine.recipe import Recipe

NEEDED = ("trl", "peft", "datasets")
SCALE_REWARDS = {"centred": "none", "group": "group"}
LOSS_TYPES = {"token": "dapo", "sequence": "grpo", "constant": "dr_grpo"}


@dataclass(frozen=True, slots=True)
class Setting:
    """How TRL cuts its step: sequences at once, whether activations are recomputed, Liger's layers."""

    micro_batch: int
    checkpointing: bool = False
    liger: bool = False

    @property
    def name(self) -> str:
        """Such as `trl batch 4`."""
        extra = (" checkpointing" if self.checkpointing else "") + (" liger" if self.liger else "")
        return f"trl batch {self.micro_batch}{extra}"


class Clock(TrainerCallback):
    """Calls `begin` and `end` around every optimizer step, sampling included."""

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._begin, self._end = begin, end

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """transformers calls it before a step's first micro-batch is prepared."""
        self._begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """transformers calls it once the optimizer has stepped."""
        self._end()


def grpo_trainer(
    recipe: Recipe,
    model_dir: Path,
    setting: Setting,
    *,
    prompts: Sequence[dict[str, Any]],
    reward: Callable[..., list[float | None]],
    clock: Clock,
    output: Path,
    rollout: Callable[..., dict[str, Any]] | None = None,
    stop: str = "",
) -> Any:
    """A GRPOTrainer for `recipe.run.steps` steps over `prompts`, taken in their order.

    `rollout` replaces the sampling (to time training alone). `stop`: every token whose text holds it is declared an
    end token of the model, as the sampler's stop string keeps the token that completes it.
    Raises ImportError where trl, peft or datasets is missing.
    """
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=recipe.model.dtype, attn_implementation="sdpa", local_files_only=True
    )
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *tokens_holding(stop, tokenizer)]
    if recipe.lora is None:
        raise ValueError("the comparison trains LoRA: the recipe needs a [lora] section")
    samples = recipe.rollout.group_size * recipe.rollout.prompts_per_step
    config = GRPOConfig(
        output_dir=str(output),
        use_cpu=True,
        bf16=recipe.model.dtype == "bfloat16",
        per_device_train_batch_size=setting.micro_batch,
        gradient_accumulation_steps=samples // setting.micro_batch,
        gradient_checkpointing=setting.checkpointing,
        use_liger_kernel=setting.liger,
        num_generations=recipe.rollout.group_size,
        max_completion_length=recipe.rollout.max_tokens,
        temperature=recipe.rollout.temperature,
        loss_type=LOSS_TYPES[recipe.loss.aggregate],
        scale_rewards=SCALE_REWARDS[recipe.loss.advantage],
        epsilon=recipe.loss.clip_low,
        epsilon_high=recipe.loss.clip_high,
        beta=recipe.loss.kl,
        learning_rate=recipe.optim.lr,
        lr_scheduler_type=recipe.optim.schedule,
        warmup_steps=recipe.optim.warmup,
        weight_decay=recipe.optim.weight_decay,
        max_grad_norm=recipe.optim.max_grad_norm,
        adam_beta1=recipe.optim.betas[0],
        adam_beta2=recipe.optim.betas[1],
        adam_epsilon=recipe.optim.eps,
        max_steps=recipe.run.steps,
        seed=recipe.run.seed,
        shuffle_dataset=False,
        save_strategy="no",
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
    )
    lora = LoraConfig(
        r=recipe.lora.rank,
        lora_alpha=cast(int, recipe.lora.alpha),  # its type says int, its arithmetic takes any number
        use_rslora=recipe.lora.rslora,
        target_modules=list(recipe.lora.targets),
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    return GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(list(prompts)),
        peft_config=lora,
        callbacks=[clock],
        rollout_func=rollout,
    )


def missing() -> str:
    """What is not installed of TRL's side, as a sentence; empty where nothing is missing."""
    names = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    return f"{', '.join(names)} not installed; the extra `bench` has them" if names else ""


def tokens_holding(text: str, tokenizer: Any) -> list[int]:
    """The ordinary tokens whose text holds `text`; none for an empty one."""
    if not text:
        return []
    return [i for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids and text in tokenizer.decode([i])]
